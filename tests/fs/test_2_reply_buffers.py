# SPDX-License-Identifier: Apache-2.0
"""A reply's buffer is not used again while the reply is on its way to a program."""

from __future__ import annotations

import os
from pathlib import Path

from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.client.reply_buffers import ReplyBuffers
from millpond.fs.vfs.inode_api import ROOT

from .support import Server


def test_of_what_was_read(tree: RemoteFs, server: Server, top: Path) -> None:
    for name in ("f", "g"):
        (top / name).write_bytes(name.encode() * 100_000)
    handles = [tree.open(tree.lookup(ROOT, name).node, os.O_RDONLY) for name in (b"f", b"g")]
    one = tree.read(handles[0], 100_000, 0)
    other = tree.read(handles[1], 100_000, 0)  # over the same slot
    assert bytes(one) == b"f" * 100_000 and bytes(other) == b"g" * 100_000


def test_buffers_are_used_again_once_nobody_has_a_view() -> None:
    buffers = ReplyBuffers(spare=1)
    views = [buffers.take(5) for _ in range(4)]
    assert len({id(view.obj) for view in views}) == 4
    last = id(views[3].obj)
    del views[3]
    assert id(buffers.take(7).obj) == last
    views.clear()
    assert len({id(view.obj) for view in [buffers.take(5) for _ in range(2)]}) == 2
