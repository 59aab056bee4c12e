# SPDX-License-Identifier: Apache-2.0
"""Edge (volumes, threads): copies small files from one volume to another, many in a request, and several
requests at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from millpond.fs.vfs.bulk_api import MAX_STORED, MAX_STORED_BYTES, FileRead, SmallFile
from millpond.fs.vfs.path_adapter import BulkPathAdapter
from millpond.fs.vfs.path_api import Attributes

_THREADS = 2
_MOST_UNDER_WAY = 2 * _THREADS
_OF_ONE = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EPERM,
        errno.ESTALE,
    }
)
_ONE_BY_ONE = frozenset({errno.EOPNOTSUPP, errno.ENFILE, errno.EMFILE})


@dataclass(frozen=True, slots=True)
class Item:
    """A file, directory or symbolic link to copy: its source, its target, its attributes."""

    source: str
    target: str
    attributes: Attributes


@dataclass(slots=True)
class Copied:
    """The result of a copy: regular files, their bytes, how many of these an earlier copy had left, how
    many files were there already, with the same size, modification time and permissions, and how many miss
    extended attributes that their place cannot hold.
    """

    files: int = 0
    bytes: int = 0
    resumed: int = 0
    unchanged: int = 0
    stripped: int = 0
    deleted: int = 0


@dataclass(frozen=True, slots=True)
class SmallCopied:
    """The end of a request: the items that were copied, those to be copied one by one, and errors."""

    copied: Sequence[Item]
    left: Sequence[Item] = ()
    failures: Sequence[CopyFailed] = ()


class CopyFailed(OSError):
    """A failure of one file; ``filename`` is its path as a user writes it."""

    @property
    def is_of_one(self) -> bool:
        """Whether it says nothing of the other files, as that of a full flash or a lost device does."""
        return self.errno in _OF_ONE


@contextlib.contextmanager
def naming(volume: BulkPathAdapter, path: str) -> Iterator[None]:
    """Raise an OSError of the block as CopyFailed, with this path, unless it has one."""
    try:
        yield
    except CopyFailed:
        raise
    except OSError as error:
        code = error.errno or errno.EIO
        raise CopyFailed(code, os.strerror(code), volume.shown(path)) from error


class SmallCopies:
    """Gathers small files of one directory until they fill a request. A context: at its end no request is
    under way.
    """

    def __init__(self, here: BulkPathAdapter, there: BulkPathAdapter, mask: int) -> None:
        self._here, self._there, self._mask = here, there, mask
        self._items: list[Item] = []
        self._bytes = 0
        self._under_way: deque[Future[SmallCopied]] = deque()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="copying")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def add(self, item: Item) -> None:
        """Copy a small regular file with others of its directory."""
        if self._items and not self._fits(item):
            self._send()
        self._items.append(item)
        self._bytes += item.attributes.size

    def _fits(self, item: Item) -> bool:
        is_room = len(self._items) < MAX_STORED and self._bytes + item.attributes.size <= MAX_STORED_BYTES
        return is_room and _folders(item) == _folders(self._items[0])

    def _send(self) -> None:
        self._under_way.append(self._threads.submit(self._copy, self._items))
        self._items, self._bytes = [], 0

    def finished(self) -> Iterator[SmallCopied]:
        """Yield the results that are there; waits if too many requests are under way."""
        while self._under_way and (self._under_way[0].done() or len(self._under_way) > _MOST_UNDER_WAY):
            yield self._under_way.popleft().result()

    def all(self) -> Iterator[SmallCopied]:
        """Yield all results."""
        if self._items:
            self._send()
        while self._under_way:
            yield self._under_way.popleft().result()

    def _copy(self, items: list[Item]) -> SmallCopied:
        """Copy files of one directory. What cannot be read so is left: its error comes when it is copied by
        itself.
        """
        source, target = _folders(items[0])
        try:
            with naming(self._here, source):
                found = self._here.read_small(source, [_name(item.source) for item in items])
            ready = [item for item in items if _is_as_listed(item, found.get(_name(item.source)))]
            files = [self._to_store(item, found[_name(item.source)]) for item in ready]
            with naming(self._there, target):
                stored = self._there.store_small(target, files) if files else ()
        except CopyFailed as error:
            return SmallCopied((), failures=(error,))
        return self._ended(items, dict(zip((item.target for item in ready), stored, strict=True)))

    def _ended(self, items: list[Item], errors: dict[str, int]) -> SmallCopied:
        """Sort the items by how they ended: ``errors`` holds an errno for each target that was sent."""
        copied = [item for item in items if errors.get(item.target) == 0]
        left = [item for item in items if errors.get(item.target, errno.EOPNOTSUPP) in _ONE_BY_ONE]
        failures = [
            CopyFailed(code, os.strerror(code), self._there.shown(target))
            for target, code in errors.items()
            if code and code not in _ONE_BY_ONE
        ]
        return SmallCopied(copied, left, failures)

    def _to_store(self, item: Item, found: FileRead) -> SmallFile:
        times = item.attributes.atime, item.attributes.mtime
        return SmallFile(
            os.fsencode(_name(item.target)), found.data, item.attributes.mode & self._mask, *times
        )


def _is_as_listed(item: Item, found: FileRead | None) -> bool:
    """Return whether a file was read as it was listed."""
    if found is None:
        return False
    now, then = found.attributes, item.attributes
    return (now.size, now.mtime, len(found.data)) == (then.size, then.mtime, then.size)


def _folders(item: Item) -> tuple[str, str]:
    return item.source.rpartition("/")[0], item.target.rpartition("/")[0]


def _name(path: str) -> str:
    return path.rpartition("/")[2]
