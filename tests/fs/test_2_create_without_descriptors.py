# SPDX-License-Identifier: Apache-2.0
"""A file is created while the server's descriptors run out: a client that gets an error has nothing open."""

from __future__ import annotations

import errno
import os

from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import ROOT

from .hostile_world import World, world

__all__ = ["world"]


def test_a_file_that_was_made_but_cannot_be_told_is_closed(world: World) -> None:
    tree = world.server.tree
    before, places = world.server.open_files, len(tree._refs)
    for _ in range(3):
        tree.max_descriptors = 1  # all the room is others'
        made = world.say(p.Create(world.node, world.fresh(), os.O_RDWR | os.O_EXCL, 0o644, None))
        tree.max_descriptors = 1 << 20
        assert made == p.Error(errno.ENFILE)
        assert world.server.open_files == before
        assert len(tree._refs) <= places and not set(tree._open) - {world.own, world.victims_handle}
        world.node = world.found(p.Walk(ROOT, (b"public",)))
    made = world.say(p.Create(world.node, world.fresh(), os.O_RDWR | os.O_EXCL, 0o644, None))
    assert isinstance(made, p.Opened) and world.server.open_files == before + 1
    world.directory = world.found(p.Walk(world.node, (b"d",)))
