"""Pure: whole small files that came with their names, until they are read."""

from __future__ import annotations

from collections import OrderedDict

from millpond.fs.client.cache.inodes import CachedInode
from millpond.fs.vfs.inode_api import Node

MOST = 64 << 10
"""The longest file whose contents come with its name, in bytes."""

_ROOM = 32 << 20
_EACH = 256  # bytes that one takes besides
_EAGER = 2


class SmallFileCache:
    """Kept only as long as what is known of the file counts. One thread may call at once."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Node, tuple[int, bytes]] = OrderedDict()
        self._bytes = 0

    def keep(self, file: CachedInode, data: bytes) -> None:
        """The whole of a file; the oldest goes if there is no room."""
        self.drop(file)
        self._kept[file.node] = file.drops, data
        self._bytes += len(data) + _EACH
        while self._bytes > _ROOM:
            self._bytes -= len(self._kept.popitem(last=False)[1][1]) + _EACH

    def take(self, file: CachedInode, size: int, offset: int) -> bytes | None:
        """Part of a file; once its end was taken, it is not needed again."""
        drops, data = self._kept.get(file.node, (-1, b""))
        if drops != file.drops:
            self.drop(file)
            return None
        if offset + size >= len(data):
            self.drop(file)
        return data[offset : offset + size]

    def has(self, file: CachedInode) -> bool:
        """Whether the file can be taken."""
        return self._kept.get(file.node, (-1, b""))[0] == file.drops

    def drop(self, file: CachedInode) -> None:
        """It is not to be used."""
        if kept := self._kept.pop(file.node, None):
            self._bytes -= len(kept[1]) + _EACH


def wanted(directory: CachedInode) -> int:
    """How many bytes of a file are to come with its name: it depends on what became of others there."""
    return MOST if directory.small_reads >= _EAGER else 0
