# SPDX-License-Identifier: Apache-2.0
"""A hostile client with an exclusive directory delegation: its names, and its delays of others."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace

import pytest

from millpond.fs.coherence import manager as manager_module
from millpond.fs.coherence.delegation_table import DEVICE
from millpond.fs.proto import async_create as n
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import ROOT
from millpond.wire.messages import Failure

from .hostile_world import World, world
from .support import LANE, Doing, errno_of

__all__ = ["world"]
REFUSED = p.Error(errno.ESTALE)


def named(w: World) -> set[str]:
    return {path.name for path in (w.public / "d").iterdir()}


def test_what_was_prepared_for_one_is_nobody_elses(world: World) -> None:
    naming = world.naming()
    with world.server.talk(b"another client 3", LANE) as other:
        public = other.find(b"public")
        assert isinstance(
            other.ask(n.Preallocate(public, 0, 3)), n.Preallocated
        )  # refused: it attends to nothing
        for each in (naming, replace(naming, directory=public), replace(naming, directory=world.directory)):
            assert other.ask(n.FlushNames((each,))) == REFUSED
    assert named(world) == {"g"}
    assert world.say(n.FlushNames((naming,))) == n.NamesFlushed()
    assert named(world) == {"g", naming.name.decode()}


def test_it_is_named_nowhere_else_and_nothing_else_is(world: World) -> None:
    naming = world.naming()
    elsewhere = replace(naming, directory=world.node)
    assert world.say(n.FlushNames((elsewhere,))) == REFUSED
    assert world.say(n.FlushNames((replace(naming, directory=ROOT),))) == p.Error(errno.EROFS)
    for node in (world.file, world.directory, world.node, ROOT, world.victims):
        assert world.say(n.FlushNames((replace(naming, node=node),))) == REFUSED
    for name in (b"", b".", b"..", b"../f", b"d/g", b"\0"):
        assert world.say(n.FlushNames((replace(naming, name=name),))) == p.Error(errno.EINVAL)
    assert world.say(n.FlushNames((replace(naming, name=b"g"),))) == p.Error(errno.EEXIST)
    assert world.say(n.FlushNames((replace(naming, granted=naming.granted + 1),))) == REFUSED
    for mode in (0o4755, 0o2755, 0o100644, -1):
        assert world.say(n.FlushNames((replace(naming, mode=mode),))) == p.Error(errno.EINVAL)
    both = world.say(n.Preallocate(world.node, 0, 1))  # one more directory is its own
    assert isinstance(both, n.Preallocated) and both.granted
    assert world.say(n.FlushNames((replace(elsewhere, granted=both.granted),))) == REFUSED
    assert named(world) == {"g"}
    assert world.say(n.FlushNames((naming,) * 2)) == REFUSED  # it has a name by then
    assert world.say(n.FlushNames((naming,))) == n.NamesFlushed()  # which was told already
    assert len(named(world)) == 2


def test_what_was_given_back_gets_no_name(world: World) -> None:
    got = world.prepared()
    world.say(p.Release(got.handles[0]))
    naming = n.NameUpdate(1, world.directory, got.granted, got.nodes[0], b"new", 0o644, 5)
    assert world.say(n.FlushNames((naming,))) == REFUSED
    assert world.say(n.FlushNames((replace(naming, node=got.nodes[1]),))) == n.NamesFlushed()


def test_more_than_is_prepared_or_told_at_once(world: World) -> None:
    got = world.prepared()
    for count in (0, -1, n.MAX_BATCH + 1, 1 << 40):
        assert isinstance(world.say(n.Preallocate(world.directory, got.granted, count)), p.Error | Failure)
    answers = [world.say(n.Preallocate(world.directory, got.granted, n.MAX_BATCH)) for _ in range(12)]
    nodes = [node for answer in answers if isinstance(answer, n.Preallocated) for node in answer.nodes]
    assert len(nodes) < 1100
    naming = n.NameUpdate(1, world.directory, got.granted, nodes[0], b"new", 0o644, 5)
    assert world.say(n.FlushNames((naming,) * (n.MAX_BATCH + 1))) == p.Error(errno.EMSGSIZE)


def test_the_device_waits_no_longer_than_the_lease(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "_CONTENDED_SECONDS", 1000.0)
    naming, manager = world.naming(), world.server.sessions.delegations
    inode = os.stat(world.public / "d").st_ino  # noqa: PTH116
    start = time.monotonic()
    Doing(manager.recall_directory, DEVICE, inode).result()
    assert time.monotonic() - start < 10 * manager.lease
    assert world.say(n.FlushNames((naming,))) == REFUSED
    assert named(world) == {"g"}
    world.attend()
    assert world.say(n.Preallocate(world.directory, 0, 1)) == n.Preallocated(0)  # others want it just now
    assert errno_of(manager.recall_directory, DEVICE, inode) is None


@pytest.mark.parametrize("asked", [p.Walk, p.ReadDirectory, p.GetAttributes])
def test_another_client_waits_no_longer_either(world: World, asked: type) -> None:
    with world.server.talk(b"another client 3", LANE) as other:
        directory = other.find(b"public", b"d")
        naming = world.naming()
        request = p.Walk(directory, (naming.name,)) if asked is p.Walk else asked(directory)
        looking = Doing(other.ask, request)
        answer = looking.result()
    if asked is p.Walk:
        assert isinstance(answer, p.Error) and answer.errno == errno.ENOENT
    assert world.say(n.FlushNames((naming,))) == REFUSED
