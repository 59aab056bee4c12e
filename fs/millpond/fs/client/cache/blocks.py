"""Pure: what was read around places of files that are read here and there, as long as it counts.

A file that has room here as a whole is read in larger pieces than it is asked for: one takes little longer
than what was asked for would alone, and the next place is likely to lie in it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from millpond.fs.client.cache.inodes import CachedInode
from millpond.fs.vfs.inode_api import Node

BLOCK = 256 << 10
ROOM = 128 << 20
LONGEST = 64 << 10
"""A read of more is not one of many small ones."""


@dataclass(frozen=True, slots=True)
class Block:
    """Read by this grant."""

    data: memoryview
    granted: int
    version: tuple[int, int]


class BlockCache:
    """The oldest goes if there is no room."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[Node, int], Block] = OrderedDict()
        self._changes: Counter[Node] = Counter()
        self._bytes = 0

    def serves(self, size: int, offset: int, end: int) -> bool:
        """Whether a read of a file of ``end`` bytes is to be done so."""
        fits = BLOCK < end <= ROOM and offset + size <= end
        return fits and size <= LONGEST and offset // BLOCK == (offset + size - 1) // BLOCK

    def version(self, file: CachedInode) -> tuple[int, int]:
        """To be taken before it is read."""
        return file.drops, self._changes[file.node]

    def changed(self, file: CachedInode) -> None:
        """What was read of it is not to be used."""
        self._changes[file.node] += 1

    def get(self, file: CachedInode, index: int) -> Block | None:
        """One of its blocks."""
        block = self._blocks.get((file.node, index))
        if block is None or block.version != self.version(file):
            return None
        self._blocks.move_to_end((file.node, index))
        return block

    def keep(self, file: CachedInode, index: int, block: Block) -> None:
        """It was read."""
        before = self._blocks.pop((file.node, index), None)
        self._bytes += len(block.data) - (len(before.data) if before else 0)
        self._blocks[file.node, index] = block
        while self._bytes > ROOM:
            self._bytes -= len(self._blocks.popitem(last=False)[1].data)
