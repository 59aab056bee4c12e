# SPDX-License-Identifier: Apache-2.0
"""Pure: caches blocks of files that are read at random places.

A file that fits into the cache as a whole is read in larger blocks than requested: one takes little longer
than the request alone, and the next place is likely to lie in it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.vfs.inode_api import Node

BLOCK = 256 << 10
ROOM = 128 << 20
LONGEST = 64 << 10
"""The largest read, in bytes, that counts as a small random one."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block's data, the grant under which it was read, and the file's version then."""

    data: memoryview
    granted: int
    version: tuple[int, int]


class BlockCache:
    """A cache of blocks that evicts the least recently used one. Threads may call at once; ``changed`` is
    called with the client's lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[Node, int], Block] = OrderedDict()
        self._bytes = 0

    def serves(self, size: int, offset: int, end: int) -> bool:
        """Return whether a read of a file of ``end`` bytes is to be done by whole blocks."""
        fits = BLOCK < end <= ROOM and offset + size <= end
        return fits and size <= LONGEST and offset // BLOCK == (offset + size - 1) // BLOCK

    def version(self, file: CachedInode) -> tuple[int, int]:
        """Return the file's version, to be taken before a block is read."""
        return file.drops, file.block_changes

    def changed(self, file: CachedInode) -> None:
        """Invalidate all blocks of a file."""
        file.block_changes += 1

    def get(self, file: CachedInode, index: int) -> Block | None:
        """Return a valid block, or None."""
        with self._lock:
            block = self._blocks.get((file.node, index))
            if block is None or block.version != self.version(file):
                return None
            self._blocks.move_to_end((file.node, index))
            return block

    def keep(self, file: CachedInode, index: int, block: Block) -> None:
        """Add a block that was read; evict others if there is no room."""
        with self._lock:
            before = self._blocks.pop((file.node, index), None)
            self._bytes += len(block.data) - (len(before.data) if before else 0)
            self._blocks[file.node, index] = block
            while self._bytes > ROOM:
                self._bytes -= len(self._blocks.popitem(last=False)[1].data)
