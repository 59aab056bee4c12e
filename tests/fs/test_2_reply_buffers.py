# SPDX-License-Identifier: Apache-2.0
"""A reply's buffer is not used again while the reply is on its way to a program."""

from __future__ import annotations

import os
from pathlib import Path

from millpond.fs.client.cache.blocks import BlockCache
from millpond.fs.client.metrics import OperationMeter
from millpond.fs.client.readahead import EXTENT, _Extent, _Lane
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.vfs.inode_api import ROOT

from .support import Server


def test_of_what_was_read(tree: RemoteFs, server: Server, top: Path) -> None:
    for name in ("f", "g"):
        (top / name).write_bytes(name.encode() * 100_000)
    handles = [tree.open(tree.lookup(ROOT, name).node, os.O_RDONLY) for name in (b"f", b"g")]
    one = tree.read(handles[0], 100_000, 0)
    other = tree.read(handles[1], 100_000, 0)  # over the same slot
    assert bytes(one) == b"f" * 100_000 and bytes(other) == b"g" * 100_000
    buffer = id(tree.rpc._free[True][-1]._buffer)
    del one, other
    tree.read(handles[0], 100_000, 0)
    assert id(tree.rpc._free[True][-1]._buffer) == buffer


def test_of_what_was_read_ahead(server: Server) -> None:
    lane = _Lane(server.dial, b"", 1.0, OperationMeter(), BlockCache())
    extent = _Extent(EXTENT, memoryview(bytearray(EXTENT)))
    assert extent.data is not None
    reply = extent.data[:5]
    lane._recycle(extent)
    other = lane._buffer()
    assert other.obj is not reply.obj
    first = id(reply.obj)
    del reply
    assert id(lane._buffer().obj) == first
