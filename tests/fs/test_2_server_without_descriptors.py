# SPDX-License-Identifier: Apache-2.0
"""The server without free descriptors, and a change whose client has stopped waiting."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import ROOT, Node

from .hostile_world import World, world
from .support import SOON, Doing, Server, errno_of

__all__ = ["world"]


def test_more_files_than_descriptors(tree: RemoteFs, server: Server, top: Path) -> None:
    """What was found longest ago is found again by its name; what is open is not affected."""
    _files(top, 60)
    (held,) = _find_all(tree, 1)
    handle = tree.open(held, os.O_RDONLY)
    server.tree.max_descriptors = 20
    nodes = _find_all(tree, 60)
    assert len(set(nodes)) == 60
    for number in (1, 59, 30, 1):
        assert tree.getattr(nodes[number]).attributes.size == len(f"{number}")
    assert bytes(tree.read(handle, 10, 0)) == b"0"
    assert tree.getattr(held).attributes.size == 1


def _files(top: Path, count: int) -> None:
    (top / "public").mkdir()
    for number in range(count):
        (top / "public" / f"{number}").write_text(f"{number}")


def _find_all(tree: RemoteFs, count: int, first: int = 0) -> list[Node]:
    public = tree.lookup(ROOT, b"public").node
    return [tree.lookup(public, b"%d" % number).node for number in range(first, count)]


@pytest.fixture
def second(server: Server) -> Iterator[RemoteFs]:
    made = RemoteFs(server.dial, timeout=SOON)
    yield made
    made.close()


def test_a_second_client_gets_the_descriptors_of_one_that_is_gone(
    tree: RemoteFs, second: RemoteFs, server: Server, top: Path
) -> None:
    """What the first one has open stays open, and what it had looked up is found again."""
    _files(top, 60)
    server.tree.max_descriptors = 40
    nodes = _find_all(tree, 60)
    handle = tree.open(nodes[59], os.O_RDONLY)
    server.drop()
    _find_all(second, 36)
    assert server.sessions.clients()[1].handlers.nodes == 37  # with the directory: none was closed for others
    assert bytes(tree.read(handle, 10, 0)) == b"59"
    assert tree.getattr(nodes[7]).attributes.size == 1


def test_clients_share_the_descriptors(tree: RemoteFs, second: RemoteFs, server: Server, top: Path) -> None:
    _files(top, 120)
    server.tree.max_descriptors = 40
    nodes, others = _find_all(tree, 60), _find_all(second, 120, 60)
    one, other = server.sessions.clients()
    assert min(one.handlers.nodes, other.handlers.nodes) >= 18
    for number in (0, 59, 1):
        assert tree.getattr(nodes[number]).attributes.size == len(f"{number}")
        assert second.getattr(others[number]).attributes.size == len(f"{60 + number}")


def test_no_client_takes_all_descriptors_with_open_files(
    tree: RemoteFs, second: RemoteFs, server: Server, top: Path
) -> None:
    _files(top, 60)
    server.tree.max_descriptors = 80
    nodes = _find_all(tree, 60)
    opened = [tree.open(node, os.O_RDWR) for node in nodes[:20]]
    assert errno_of(tree.open, nodes[20], os.O_RDWR) == errno.EMFILE
    assert second.open(_find_all(second, 60)[0], os.O_RDWR)
    assert tree.write(opened[0], b"x", 0) == 1


def test_a_change_that_nobody_waits_for_is_not_done(top: Path) -> None:
    """Its client has hung up while it waited for another that does not give up what it keeps."""
    server = Server(top, public=b"public")
    tree = RemoteFs(server.dial, timeout=SOON)
    (top / "public").mkdir()
    (top / "public" / "a").write_text("a")
    public = tree.lookup(ROOT, b"public").node
    inode = (top / "public").stat().st_ino
    manager = server.sessions.delegations
    other = manager.join()
    manager.begin_lease(other, lambda: False)
    assert manager.grant_read(other, inode)
    removing = Doing(tree.unlink, public, b"a")
    assert manager.next_recall(other, SOON)[0]
    server.cut()
    assert errno_of(removing.result)
    manager.expire(other)
    tree.close()
    server.close()
    assert (top / "public" / "a").exists()


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
