# SPDX-License-Identifier: Apache-2.0
"""Pure: invalidates cached state around a change that this client makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.inodes import InodeCache
from millpond.fs.proto.file_ops import AttributesAre


class Invalidation:
    """A context around a change of ``files``, of names in them or, with ``data_only``, of the data and
    attributes of one: invalidates their cached state at its beginning and at its end.

    Replies under way are not cached, and ``drop`` discards what was read ahead. After the context ``since``
    lets the change's own reply be cached, unless this client has changed these files or names meanwhile.
    """

    def __init__(
        self,
        inodes: InodeCache,
        lock: AbstractContextManager[bool],
        drop: Callable[[CachedInode], None],
        files: Sequence[CachedInode],
        *,
        data_only: bool = False,
    ) -> None:
        self._inodes, self._lock, self._drop, self._files = inodes, lock, drop, files
        self._changed = files[0] if data_only else None
        self.since = 0

    def __enter__(self) -> Self:
        with self._lock:
            self.since = self._inodes.change(self._changed)
            self._forget()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        with self._lock:
            if isinstance(error, OSError):  # the change may have been made, or will be
                for file in self._files:
                    file.drop_names()
            self._forget()
            alone = all(self._inodes.is_current(file, self.since) for file in self._files)
            now = self._inodes.change(self._changed)
            self.since = now if alone else -1
            for file in self._files:
                file.durability.change()

    def _forget(self) -> None:
        for file in self._files:
            file.attributes = None
            self._drop(file)

    def learn(self, file: CachedInode, reply: AttributesAre) -> None:
        """With the lock, after the change: cache the attributes that its reply brought."""
        self._inodes.learn(file, reply.attributes, reply.granted, since=self.since)

    def learn_reply(self, file: CachedInode, reply: AttributesAre | None) -> None:
        """After the change: cache the attributes that its reply brought, if it did."""
        if reply:
            with self._lock:
                self.learn(file, reply)
