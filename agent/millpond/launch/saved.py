# SPDX-License-Identifier: Apache-2.0
"""Edge: the files that a launched script has saved in its folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from millpond.base.deadline import NEVER
from millpond.base.errors import ConfigError
from millpond.train.distributed.launch_messages import (
    LONGEST_PATH,
    MOST_FILES,
    MOST_NAMED,
    SAVED_PART,
    AllSaved,
    SavedPart,
    check_path,
)
from millpond.wire.channel import Channel

_CACHES = "__pycache__"
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SavedFiles:
    """The plain files below ``folder`` that are new, or changed, since this was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = {path: _version(folder / path) for path in self._all()}
        self._files = self._bytes = 0
        self._left_out: list[str] = []

    def send(self, channel: Channel, most: int) -> None:
        """Send files of ``most`` bytes in all, by name, and leave the others out. None if ``most`` is 0: then
        all are counted.
        """
        left = most
        for path in self._all():
            if self._before.get(path) == _version(self._folder / path):
                continue
            size = self._size(path)
            if size is None or (most and (self._files >= MOST_FILES or size > left)):
                self._left_out.append(path)
                continue
            self._files += 1
            self._bytes += size
            if most:
                left -= size
                self._send(channel, path, size)
        named = (path.encode(errors="replace").decode() for path in self._left_out[:MOST_NAMED])
        channel.send(AllSaved(self._files, self._bytes, len(self._left_out), tuple(named)), NEVER)

    def _all(self) -> list[str]:
        return sorted(self._walk(""))

    def _walk(self, below: str) -> Iterator[str]:
        """Yield all names but those of folders; of a folder whose name is too long for all in it, its own.
        Links are followed nowhere.
        """
        try:
            entries = list(os.scandir(self._folder / below))
        except OSError:  # the script has closed or removed it
            return
        for entry in entries:
            path = f"{below}{entry.name}"
            if not entry.is_dir(follow_symlinks=False) or len(path) >= LONGEST_PATH:
                yield path
            elif entry.name != _CACHES:
                yield from self._walk(f"{path}/")

    def _size(self, path: str) -> int | None:
        """Return the size of a plain file that can be read and named; None for all else."""
        try:
            check_path(path)
            found = (self._folder / path).lstat()
        except (ConfigError, OSError):
            return None
        return (
            found.st_size if stat.S_ISREG(found.st_mode) and os.access(self._folder / path, os.R_OK) else None
        )

    def _send(self, channel: Channel, path: str, size: int) -> None:
        descriptor = os.open(self._folder / path, _FLAGS)
        try:
            for start in range(0, max(size, 1), SAVED_PART):
                data = os.pread(descriptor, min(SAVED_PART, size - start), start)
                channel.send(SavedPart(path, start, size), NEVER, data)
        finally:
            os.close(descriptor)


def _version(path: Path) -> tuple[int, int, int]:
    found = path.lstat()
    return found.st_size, found.st_mtime_ns, found.st_ino
