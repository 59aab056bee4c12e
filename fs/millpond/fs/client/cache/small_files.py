# SPDX-License-Identifier: Apache-2.0
"""Pure: caches whole small files that arrive with their lookup, until they are read."""

from __future__ import annotations

from collections import OrderedDict

from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.vfs.inode_api import Node

MOST = 64 << 10
"""The size of the largest file whose contents come with its lookup, in bytes."""

_ROOM = 32 << 20
_EACH = 256  # bytes of overhead per file
_EAGER = 2


class SmallFileCache:
    """Contents of small files, valid only as long as the cached state of their inode. One thread may call at
    once.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Node, tuple[int, bytes]] = OrderedDict()
        self._bytes = 0

    def keep(self, file: CachedInode, data: bytes) -> None:
        """Add the whole of a file; evict the oldest if there is no room."""
        self.drop(file)
        self._kept[file.node] = file.drops, data
        self._bytes += len(data) + _EACH
        while self._bytes > _ROOM:
            self._bytes -= len(self._kept.popitem(last=False)[1][1]) + _EACH

    def take(self, file: CachedInode, size: int, offset: int) -> bytes | None:
        """Return part of a file, or None; a read up to the end removes the file from the cache."""
        drops, data = self._kept.get(file.node, (-1, b""))
        if drops != file.drops:
            self.drop(file)
            return None
        if offset + size >= len(data):
            self.drop(file)
        return data[offset : offset + size]

    def has(self, file: CachedInode) -> bool:
        """Return whether the contents of a file are cached and valid."""
        return self._kept.get(file.node, (-1, b""))[0] == file.drops

    def drop(self, file: CachedInode) -> None:
        """Remove a file."""
        if kept := self._kept.pop(file.node, None):
            self._bytes -= len(kept[1]) + _EACH


def wanted(directory: CachedInode) -> int:
    """Return how many bytes of a file to request with its lookup: 0 until files of that directory
    were read.
    """
    return MOST if directory.small_reads >= _EAGER else 0
