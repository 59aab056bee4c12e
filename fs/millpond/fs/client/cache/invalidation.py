"""Pure: a change of files by their client, and what may be gone by of them before, meanwhile and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from millpond.fs.client.cache.inodes import CachedInode, InodeCache
from millpond.fs.proto.file_ops import AttributesAre


class Invalidation:
    """Around a change of ``files``. What was known of them does not count from its beginning on, nor what
    replies under way say; what is read ahead of them goes by ``drop``. Once it has ended, what its own reply
    told counts by ``since``, unless something else was changed meanwhile.
    """

    def __init__(
        self,
        book: InodeCache,
        lock: AbstractContextManager[bool],
        drop: Callable[[CachedInode], None],
        files: Sequence[CachedInode],
    ) -> None:
        self._book, self._lock, self._drop, self._files = book, lock, drop, files
        self.since = 0

    def __enter__(self) -> Self:
        with self._lock:
            self.since = self._book.change()
            self._forget()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        with self._lock:
            if isinstance(error, OSError):  # it may have been done, or will be
                for file in self._files:
                    file.names.clear()
                    file.unsure += 1
            self._forget()
            alone = self.since == self._book.changes
            now = self._book.change()
            self.since = now if alone else -1
            for file in self._files:
                file.durability.change()

    def _forget(self) -> None:
        for file in self._files:
            file.attributes, file.listing = None, None
            self._drop(file)

    def learn(self, file: CachedInode, told: AttributesAre) -> None:
        """With the lock, after the change: how the file is now."""
        self._book.learn(file, told.attributes, told.granted, since=self.since)
