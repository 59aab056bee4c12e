# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the files of the audit log, to which entries are appended.

A file is named by the number of its first entry. Once one is full the next is begun, and the oldest goes when
there are too many. After a kill or a power cut the last file may end within an entry: what continues no entry
is cut, kept apart, and told.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from millpond.base.errors import ProtocolError
from millpond.linux.files import sync_folder, write_secret
from millpond.wire.audit_log import PAGE_BYTES, ChainReader, Cut, Dropped, Event, LogHead, digest_of, encode

FILE_BYTES = 1 << 20
FILES = 64
"""The most files that stay. A job that trains without a break takes one in two days."""
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class AuditLog:
    """The log in ``folder``, which is made if it is not there. ``repeated`` returns the events that each file
    begins with. Raises OSError.
    """

    def __init__(
        self,
        folder: Path,
        repeated: Callable[[], Sequence[Event]] = tuple,
        *,
        file_bytes: int = FILE_BYTES,
        files: int = FILES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._repeated, self._clock = folder, repeated, clock
        self._file_bytes, self._files, self._untold = file_bytes, files, list[Event]()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._firsts = sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdigit())
        while len(self._firsts) > 1 and not self._path(self._firsts[-1]).stat().st_size:
            self._path(self._firsts.pop()).unlink()
        self.head = LogHead()
        self._descriptor, self._size = self._open(self._firsts[-1] if self._firsts else 1)
        self._recover()

    @property
    def oldest(self) -> int:
        """The number of the oldest entry that is kept."""
        return self._firsts[0]

    def append(self, event: Event) -> None:
        """Append an entry, which a kill of the agent leaves whole. Raises OSError, and leaves the log as it
        was.
        """
        if self._size >= self._file_bytes:
            self._begin_file()
        while self._untold:
            self._write(self._untold[0])
            del self._untold[0]
        self._write(event)

    def sync(self) -> None:
        """Have all entries on the disk. Raises OSError."""
        os.fdatasync(self._descriptor)

    def lines(self, first: int, most: int = PAGE_BYTES) -> tuple[str, ...]:
        """Return lines from the entry ``first`` on, of ``most`` bytes and one line more, and of one file at
        most; none for an entry that is not there. Raises OSError.
        """
        place = bisect.bisect_right(self._firsts, first) - 1
        if place < 0 or first > self.head.number:
            return ()
        found, size = list[str](), 0
        for number, line in enumerate(_lines_of(self._path(self._firsts[place])), self._firsts[place]):
            if number >= first:
                found.append(line)
                size += len(line)
            if size > most:
                break
        return tuple(found)

    def close(self) -> None:
        """Have all entries on the disk, and close the log. Raises OSError."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _path(self, first: int) -> Path:
        return self._folder / f"{first:012}.jsonl"

    def _open(self, first: int) -> tuple[int, int]:
        """Open the file that begins with the entry ``first``. Returns its descriptor and size."""
        descriptor = os.open(self._path(first), _FLAGS, 0o600)
        if first not in self._firsts:
            self._firsts.append(first)
            sync_folder(self._folder)
        return descriptor, os.fstat(descriptor).st_size

    def _write(self, event: Event) -> None:
        line = encode(self.head, self._clock(), event)
        data = line.encode() + b"\n"
        try:
            write_whole(self._descriptor, data)
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)
        self.head = LogHead(self.head.number + 1, digest_of(line))

    def _begin_file(self) -> None:
        self.sync()
        before = self._descriptor
        self._descriptor, self._size = self._open(self.head.number + 1)
        os.close(before)
        while len(self._firsts) > self._files:
            self._untold.append(Dropped(self._firsts[1] - 1, self._last_digest_of(self._firsts[0])))
            self._path(self._firsts.pop(0)).unlink()
        self._untold += self._repeated()

    def _last_digest_of(self, first: int) -> str:
        digest = ""
        for line in _lines_of(self._path(first)):
            digest = digest_of(line)
        return digest

    def _recover(self) -> None:
        """Find the head, and cut what comes behind the last entry that continues the chain."""
        first, before = self._firsts[-1], LogHead()
        if len(self._firsts) > 1:
            before = LogHead(first - 1, self._last_digest_of(self._firsts[-2]))
        reader = ChainReader(before if first == 1 or before.number else None)
        data, good = os.pread(self._descriptor, self._size, 0), 0
        while (end := data.find(b"\n", good)) >= 0:
            try:
                reader.take(data[good:end].decode("ascii", errors="replace"))
            except ProtocolError:
                break
            good = end + 1
        self.head = reader.head or LogHead(first - 1)
        if rest := data[good:]:
            with contextlib.suppress(OSError):  # a full disk
                write_secret(self._folder / "cut", rest)
            os.ftruncate(self._descriptor, good)
            self._size = good
            self._untold.append(Cut(len(rest), hashlib.sha256(rest).hexdigest()))


def write_whole(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, or raise OSError: a disk may have room for a part of it."""
    if os.write(descriptor, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lines_of(path: Path) -> Iterator[str]:
    with path.open(encoding="ascii", errors="replace", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n")
