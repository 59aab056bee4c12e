# SPDX-License-Identifier: Apache-2.0
"""Pure: invalidates cached state around a change that this client makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from millpond.fs.client.cache.inodes import CachedInode, InodeCache
from millpond.fs.proto.file_ops import AttributesAre


class Invalidation:
    """A context around a change of ``files``: invalidates their cached state at its beginning and at its end.

    Replies under way are not cached, and ``drop`` discards what was read ahead. After the context ``since``
    lets the change's own reply be cached, unless this client has changed anything else meanwhile.
    """

    def __init__(
        self,
        inodes: InodeCache,
        lock: AbstractContextManager[bool],
        drop: Callable[[CachedInode], None],
        files: Sequence[CachedInode],
    ) -> None:
        self._inodes, self._lock, self._drop, self._files = inodes, lock, drop, files
        self.since = 0

    def __enter__(self) -> Self:
        with self._lock:
            self.since = self._inodes.change()
            self._forget()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        with self._lock:
            if isinstance(error, OSError):  # the change may have been made, or will be
                for file in self._files:
                    file.names.clear()
                    file.name_doubts += 1
            self._forget()
            alone = self.since == self._inodes.changes
            now = self._inodes.change()
            self.since = now if alone else -1
            for file in self._files:
                file.durability.change()

    def _forget(self) -> None:
        for file in self._files:
            file.attributes, file.listing = None, None
            self._drop(file)

    def learn(self, file: CachedInode, reply: AttributesAre) -> None:
        """With the lock, after the change: cache the attributes that its reply brought."""
        self._inodes.learn(file, reply.attributes, reply.granted, since=self.since)
