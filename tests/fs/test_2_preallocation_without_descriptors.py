# SPDX-License-Identifier: Apache-2.0
"""Files are preallocated while the server's descriptors run out: none stays open, no directory is lost."""

from __future__ import annotations

import errno

from millpond.fs.proto import async_create as n
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import ROOT

from .hostile_world import World, world
from .support import LANE

__all__ = ["world"]


def fill(world: World) -> None:
    """There are as many descriptors as there may be."""
    tree = world.server.tree
    tree.max_descriptors = len(tree._refs) + len(tree._open)


def spread(world: World) -> None:
    """There are as many as are needed."""
    world.server.tree.max_descriptors = 1 << 20


def test_what_cannot_be_prepared_does_not_stay_open(world: World) -> None:
    """A client learns only of what the answer names: nobody would ever close the others."""
    world.attend()
    before = world.server.open_files
    for _ in range(5):
        fill(world)
        for _ in range(3):  # in the end there is nothing that could be forgotten for it
            answer = world.say(n.Preallocate(world.directory, 0, 4))
        spread(world)
        assert isinstance(answer, p.Error | n.Preallocated)
        told = answer.nodes if isinstance(answer, n.Preallocated) else ()
        assert world.server.open_files == before + len(told)
        world.node = world.found(p.Walk(ROOT, (b"public",)))
        world.directory = world.found(p.Walk(world.node, (b"d",)))


def test_a_directory_is_not_forgotten_for_what_is_prepared_for_it(world: World) -> None:
    """Another client knows it, too, so that only its maker's names would be lost."""
    with world.server.talk(b"another client 3", LANE) as other:
        other.find(b"public", b"d")
        world.attend()
        world.say(p.Forget((world.file, world.node)))  # now it is the one that was found longest ago
        found = [world.found(p.Walk(ROOT, (b"public", name))) for name in (b"link", b"fifo")]
        fill(world)
        got = world.say(n.Preallocate(world.directory, 0, 1))
        spread(world)
        assert isinstance(got, n.Preallocated) and got.nodes
        naming = n.NameUpdate(
            next(world.serials), world.directory, got.granted, got.nodes[0], b"new", 0o644, 5
        )
        assert world.say(n.FlushNames((naming,))) == n.NamesFlushed()
        assert (world.public / "d/new").exists()
        for node in found:  # they had to go instead
            assert world.say(p.GetAttributes(node)) == p.Error(errno.ESTALE)
        world.node = world.found(p.Walk(ROOT, (b"public",)))
