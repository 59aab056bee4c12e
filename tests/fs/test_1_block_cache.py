# SPDX-License-Identifier: Apache-2.0
"""The cache of blocks around random reads, and the buffers of replies."""

from __future__ import annotations

import gc
import sys

from millpond.fs.client.cache.blocks import BLOCK, Block, BlockCache
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.reply_buffers import ReplyBuffers
from millpond.fs.vfs.inode_api import ROOT, Node


def inode(number: int) -> CachedInode:
    return CachedInode(Node(number), number, ROOT, b"f")


def block(cache: BlockCache, file: CachedInode) -> Block:
    return Block(memoryview(bytes(BLOCK)), 1, cache.version(file))


def test_a_change_makes_a_files_blocks_invalid() -> None:
    cache, one, other = BlockCache(), inode(1), inode(2)
    under_way = block(cache, one)
    for file in (one, other):
        cache.keep(file, 0, block(cache, file))
    cache.changed(one)
    assert cache.get(one, 0) is None and cache.get(other, 0)
    cache.keep(one, 0, under_way)  # which was read before
    assert cache.get(one, 0) is None
    other.drop()
    assert cache.get(other, 0) is None


def held(cache: BlockCache) -> int:
    """How many bytes the cache's own tables take."""
    return sum(map(sys.getsizeof, gc.get_referents(cache)))


def test_a_file_that_is_gone_leaves_nothing() -> None:
    cache = BlockCache()
    before = held(cache)
    for number in range(10_000):
        cache.changed(inode(number))
    assert held(cache) == before


def test_buffers_are_used_again_once_nobody_has_a_view() -> None:
    buffers = ReplyBuffers(spare=1)
    views = [buffers.take(5) for _ in range(4)]
    assert len({id(view.obj) for view in views}) == 4
    last = id(views[3].obj)
    del views[3]
    assert id(buffers.take(7).obj) == last
    views.clear()
    assert len({id(view.obj) for view in [buffers.take(5) for _ in range(2)]}) == 2
