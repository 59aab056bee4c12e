# SPDX-License-Identifier: Apache-2.0
"""Pure: caches data of files: whole small ones that arrive with their lookup, until they are read, and blocks
of files that are read at random places.

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
MOST = 64 << 10
"""The size of the largest file whose contents come with its lookup, in bytes, and of the largest read that
counts as a small random one."""
_ROOM = 128 << 20
_EACH = 256  # bytes of overhead per block
_EAGER = 2


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
        fits = BLOCK < end <= _ROOM and offset + size <= end
        return fits and size <= MOST and offset // BLOCK == (offset + size - 1) // BLOCK

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
            self._remove((file.node, index))
            self._bytes += len(block.data) + _EACH
            self._blocks[file.node, index] = block
            while self._bytes > _ROOM:
                self._remove(next(iter(self._blocks)))

    def _remove(self, place: tuple[Node, int]) -> None:
        if before := self._blocks.pop(place, None):
            self._bytes -= len(before.data) + _EACH

    def keep_whole(self, file: CachedInode, data: bytes) -> None:
        """With the client's lock: add the whole of a small file, valid as it is now."""
        self.keep(file, 0, Block(memoryview(data), 0, self.version(file)))

    def take_whole(self, file: CachedInode, size: int, offset: int) -> memoryview | None:
        """Return part of a small file, or None; a read up to the end removes it from the cache: the kernel
        has it.
        """
        block = self.get(file, 0)
        if block is None or len(block.data) > MOST:  # one of a larger file
            return None
        if offset + size >= len(block.data):
            with self._lock:
                self._remove((file.node, 0))
        return block.data[offset : offset + size]


def wanted(directory: CachedInode) -> int:
    """Return how many bytes of a file to request with its lookup: 0 until files of that directory
    were read.
    """
    return MOST if directory.small_reads >= _EAGER else 0
