# SPDX-License-Identifier: Apache-2.0
"""The volume over connections that are lost: no request runs twice, and open files stay open."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost
from millpond.fs.client.cache import inodes
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.bulk_copy import EntriesPlus, ReadDirectoryPlus
from millpond.fs.server import client_state, sessions
from millpond.fs.server.sessions import SessionTable
from millpond.fs.vfs.inode_api import ROOT
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure

from ..effort import scaled
from ..waiting import eventually
from .support import NAME, SLOT, SOON, Cutting, Doing, Held, Server, errno_of

SLOTS = sessions._MAX_SLOTS


MOST_FILES = scaled(quick=300, full=4096)


def test_lost_between_two_operations(volume: PathAdapter, server: Server, top: Path) -> None:
    handle = volume.open("f", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    volume.write(handle, b"hello", 0)
    server.drop()
    assert volume.read(handle, 5, 0) == b"hello"  # opened again, and not created, emptied or refused
    server.drop()
    volume.mkdir("d", 0o755)  # known not to be sent: an idle end is seen first
    server.drop()
    volume.rename("f", "d/f")
    server.drop()
    assert volume.write(handle, b"H", 0) == 1  # found under its new name
    assert (top / "d" / "f").read_bytes() == b"Hello"
    (top / "d" / "f").unlink()
    server.drop()
    assert volume.read(handle, 9, 0) == b"Hello"  # without any name, it is still open
    server.drop()
    volume.release(handle)
    volume.statfs()
    assert server.open_files == 0
    assert server.dialled == 7


def test_files_by_number_are_found_again(tree: RemoteFs, server: Server, top: Path) -> None:
    outer = tree.mkdir(ROOT, b"outer", 0o755, None).node
    inner = tree.mkdir(outer, b"inner", 0o755, None).node
    found, handle = tree.create(inner, b"f", os.O_RDWR, 0o644, None)
    tree.write(handle, b"one", 0)
    tree.rename(ROOT, b"outer", ROOT, b"renamed")
    server.restart()
    assert tree.read(handle, 9, 0) == b"one"
    assert tree.getattr(found.node).attributes.size == 3
    server.restart()
    assert tree.lookup(inner, b"f").node == found.node
    server.restart()
    (top / "renamed" / "inner" / "f").rename(top / "elsewhere")
    assert errno_of(tree.getattr, found.node) == errno.ESTALE
    assert tree.getattr(inner).attributes.inode == (top / "renamed" / "inner").stat().st_ino
    assert tree.lookup(ROOT, b"elsewhere").node == found.node
    assert tree.getattr(found.node).attributes.size == 3


def test_lost_before_sending(volume: PathAdapter, server: Server, top: Path) -> None:
    volume.statfs()
    Cutting.cut_before = "fs.make"
    volume.mkdir("d", 0o755)
    assert (top / "d").is_dir() and server.dialled == 2


def test_nothing_is_done_twice(volume: PathAdapter, server: Server, top: Path) -> None:
    log = volume.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("fs.write", lambda: volume.write(log, b"once", 0)),
        ("fs.make", lambda: volume.mkdir("d", 0o755)),
        ("fs.make", lambda: volume.mknod("n", 0o100644)),
        ("fs.rename", lambda: volume.rename("n", "m")),
        ("fs.link", lambda: volume.link("m", "d/l")),
        ("fs.make", lambda: volume.symlink("m", "s")),
        ("fs.create", lambda: volume.release(volume.open("x", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))),
        ("fs.remove", lambda: volume.unlink("m")),
        ("fs.remove", lambda: volume.unlink("d/l")),
        ("fs.remove", lambda: volume.rmdir("d")),
    ]
    for name, call in calls:
        Cutting.cut_after = name
        call()
        assert Cutting.cut_after is None
    Cutting.cut_after = "fs.remove"
    assert errno_of(volume.unlink, "m") == errno.ENOENT  # a failure is told again as well
    assert (top / "log").read_bytes() == b"once"
    assert sorted(os.listdir(top)) == ["log", "s", "x"]  # noqa: PTH208
    assert server.dialled == len(calls) + 2
    volume.release(log)


def test_a_reply_that_is_lost_more_than_once(volume: PathAdapter, server: Server, top: Path) -> None:
    volume.statfs()
    Cutting.cut_after = "fs.make"
    Cutting.cut_after_that = "fs.again"
    volume.mkdir("d", 0o755)
    assert Cutting.cut_after is None and Cutting.cut_after_that is None
    assert (top / "d").is_dir() and server.dialled == 3


@pytest.mark.parametrize("cut", ["cut_after", "lose"])
def test_what_goes_out_with_a_request_is_not_taken_for_it(
    volume: PathAdapter, server: Server, top: Path, cut: str
) -> None:
    """A release is only told with the next request: both are performed, or only the first, or none."""
    handles = [volume.open(name, os.O_RDWR | os.O_CREAT, 0o644) for name in "fgh"]
    (top / "gone").mkdir()
    for handle in handles:
        volume.release(handle)
    setattr(Cutting, cut, "fs.remove")
    volume.rmdir("gone")
    assert getattr(Cutting, cut) is None
    assert not (top / "gone").exists()
    assert server.open_files == 0


def test_what_was_done_is_not_done_again_though_it_might(
    volume: PathAdapter, server: Server, top: Path
) -> None:
    volume.release(volume.open("f", os.O_RDWR | os.O_CREAT, 0o644))

    def between() -> None:
        (top / "f").write_text("the device's")

    Cutting.then = between  # of a lost reply and the next connection
    Cutting.cut_after = "fs.setattr"
    volume.truncate("f", 0)
    assert (top / "f").read_text() == "the device's"
    Cutting.cut_after = "fs.open"
    handle = volume.open("f", os.O_RDWR | os.O_TRUNC)
    assert (top / "f").read_text() == "the device's"
    volume.release(handle)
    volume.statfs()
    assert server.open_files == 0


def test_a_client_has_so_many_files_open_and_no_more(
    tree: RemoteFs, volume: PathAdapter, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / "f").touch()
    monkeypatch.setattr(client_state, "_MAX_FILES", MOST_FILES)
    handles = [volume.open("f", os.O_RDONLY) for _ in range(MOST_FILES)]
    assert errno_of(volume.open, "f", os.O_RDONLY) == errno.EMFILE
    assert errno_of(tree.create, ROOT, b"g", os.O_RDWR, 0o644, None) == errno.EMFILE
    assert not (top / "g").exists()
    volume.release(handles.pop())
    volume.open("f", os.O_RDONLY)


def test_what_arrives_late_over_an_earlier_connection_is_not_done(server: Server, top: Path) -> None:
    with server.talk() as first:
        assert first.welcome.verifier and first.welcome.performed == 0
        first.call(p.Make(ROOT, b"d", stat.S_IFDIR | 0o755), p.FoundIs)
        with server.talk() as second:
            assert (second.welcome.verifier, second.welcome.performed) == (first.welcome.verifier, 1)
            with contextlib.suppress(ConnectionLost):
                first.ask(p.Make(ROOT, b"late", stat.S_IFDIR | 0o755))
            second.call(p.Again(), p.FoundIs)
            second.call(p.Remove(ROOT, b"d", True), p.Changed)
    assert os.listdir(top) == []  # noqa: PTH208


def test_there_is_not_always_something_to_be_told_again(server: Server, top: Path) -> None:
    with server.talk() as client:
        assert client.ask(p.Again()) == p.Error(errno.EIO)
        client.call(ReadDirectoryPlus(ROOT), EntriesPlus)
        (top / "f").write_text("data")
        client.call(p.Read(client.open(b"f"), 9, 0), p.Data)
        assert client.ask(p.Again()) == p.Error(errno.EIO)
        assert client.ask(p.Remove(ROOT, b"none")) == client.ask(p.Again()) == p.Error(errno.ENOENT)


def test_slots_are_conversations_over_the_same_files(server: Server, top: Path) -> None:
    (top / "f").write_text("inside")
    with server.talk(slot=b"the first slot's") as one, server.talk(slot=b"the second slot.") as two:
        assert one.welcome == two.welcome
        handle = one.open(b"f")
        two.call(p.Read(handle, 9, 0), p.Data)
        two.call(p.Write(handle, 0), p.Written, b"IN")
        two.call(p.Make(ROOT, b"d", stat.S_IFDIR | 0o755), p.FoundIs)
        one.call(p.Again(), p.Opened)  # each its own last reply, and its own count
        two.call(p.Again(), p.FoundIs)
        with server.talk(slot=b"the second slot.") as again:
            assert again.welcome.performed == 3
            again.post(p.Release(handle))
            again.call(p.GetStatistics(), p.StatisticsAre)
        assert one.ask(p.Read(handle, 9, 0)) == p.Error(errno.EBADF)
        with server.talk(slot=b"the first slot's") as again:
            assert again.welcome.performed == 3
    assert (top / "f").read_text() == "INside"


def test_any_number_of_threads_one_after_the_other(tree: RemoteFs) -> None:
    for _ in range(3 * SLOTS):
        Doing(tree.statfs).result()


def test_a_client_has_so_many_slots_and_no_more(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        talks = [stack.enter_context(server.talk(slot=b"%16d" % number)) for number in range(SLOTS)]
        with Channel(server.raw(), "server") as channel:
            channel.send(p.SessionHello(NAME, b"one more slot's."), Deadline.after(SOON))
            assert isinstance(channel.receive(Deadline.after(SOON)).message, Failure)
        with server.talk(slot=b"%16d" % 3) as again:  # one that it has
            again.call(p.GetStatistics(), p.StatisticsAre)
        talks[0].call(p.GetStatistics(), p.StatisticsAre)


def test_an_idle_client_forgets_all(
    tree: RemoteFs, server: Server, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is posted or forgotten goes out without any other request."""
    for number in range(100):
        (top / f"{number}").touch()
    nodes = [tree.lookup(ROOT, b"%d" % number).node for number in range(100)]
    (client,) = server.sessions.clients()
    assert client.handlers.nodes == 100
    monkeypatch.setattr(inodes, "_MOST_FORGOTTEN", 30)  # in one request
    tree.release(tree.open(nodes[0], os.O_RDWR))
    assert tree.session.posted
    tree.session.flush()
    assert server.open_files == 0
    for node in nodes:
        tree.forget(node, 1)
    with tree.session.lock:
        tree.session.inodes.forget_idle()
    tree.session.flush()
    assert client.handlers.nodes == 0


def test_a_slot_that_waits_holds_up_nobody_else(server: Server, top: Path) -> None:
    """One that comes back while its last request is still being done, and another client meanwhile."""
    slow = Held(server.tree, "statfs")
    with Channel(server.raw(), "server") as channel, Channel(server.raw(), "server") as again:
        channel.call(p.SessionHello(NAME, SLOT), p.SessionWelcome, Deadline.after(SOON))
        channel.send(p.GetStatistics(), Deadline.after(SOON))
        slow.begun()
        again.send(p.SessionHello(NAME, SLOT), Deadline.after(SOON))
        time.sleep(0.1)  # it may have come there by now
        with server.talk(b"somebody else's.") as other:
            other.call(p.GetAttributes(ROOT), p.AttributesAre)
            other.call(p.Goodbye(), p.Done)
        slow.go_on.set()
        assert again.expect(p.SessionWelcome, Deadline.after(SOON)).performed == 1


def test_sessions_end(server: Server, top: Path) -> None:
    (top / "f").write_text("inside")
    with server.talk() as client:
        memory = client.welcome.verifier
        client.open(b"f")
        client.call(p.Goodbye(), p.Done)
    server.join()
    assert server.open_files == 0
    server.sessions = SessionTable(server.tree, retention=60.0)
    with server.talk() as client:
        assert client.welcome.verifier != memory
        memory = client.welcome.verifier
        client.open(b"f")
    server.join()
    waiting = server.sessions._timers[NAME]
    with server.talk() as client:  # in time
        assert (client.welcome.verifier, client.welcome.performed) == (memory, 2)
        waiting.join(SOON)
        assert not waiting.is_alive() and server.open_files == 1  # it will not be ended after all
        server.sessions._retention = 0.05
    server.join()
    eventually(lambda: server.open_files == 0, "the server has closed the file")
    with server.talk() as client:
        assert client.welcome.verifier not in (0, memory) and client.welcome.performed == 0


def test_a_client_that_ended_does_no_more_over_its_other_slots(server: Server, top: Path) -> None:
    (top / "f").write_text("inside")
    with server.talk(slot=b"the first slot's") as one, server.talk(slot=b"the second slot.") as two:
        two.find(b"f")
        one.call(p.Goodbye(), p.Done)
        for request in (p.Walk(ROOT, (b"f",)), p.Create(ROOT, b"late", os.O_RDWR, 0o644), p.Open(2, 0)):
            with contextlib.suppress(ConnectionLost):
                assert isinstance(two.ask(request), p.Error)
    server.join()
    assert server.open_files == 0 and not (top / "late").exists()
    assert len(server.tree._refs) == 1  # only the root


def test_a_client_that_ends_in_the_middle_of_a_request_leaves_nothing_open(server: Server, top: Path) -> None:
    slow = Held(server.tree, "create")
    with server.talk(slot=b"the first slot's") as one, server.talk(slot=b"the second slot.") as two:
        two.channel.send(p.Create(ROOT, b"f", os.O_RDWR, 0o644), Deadline.after(SOON))
        slow.begun()
        one.call(p.Goodbye(), p.Done)
        slow.go_on.set()
        with contextlib.suppress(ConnectionLost):
            two.channel.receive(Deadline.after(SOON))
    server.join()
    assert server.open_files == 0 and len(server.tree._refs) == 1


def test_there_are_not_any_number_of_clients(server: Server) -> None:
    def memory_of(number: int) -> int:
        with server.talk(b"%16d" % number) as client:
            memory = client.welcome.verifier
        server.threads[-1].join(SOON)  # now the server knows that it is away
        return memory

    def refused(name: bytes, slot: bytes = SLOT) -> bool:
        with Channel(server.raw(), "server") as channel:
            channel.send(p.SessionHello(name, slot), Deadline.after(SOON))
            return isinstance(channel.receive(Deadline.after(SOON)).message, Failure)

    with contextlib.ExitStack() as stack:
        for number in range(63):
            stack.enter_context(server.talk(b"%16d" % number))
        assert memory_of(100) != memory_of(101)  # who is away makes room
        stack.enter_context(server.talk(b"%16d" % 102))
        assert refused(b"%16d" % 103)
    for name in (b"", b"short", bytes(17)):
        assert refused(name) and refused(NAME, name)


def test_lost_in_the_middle(volume: PathAdapter, server: Server, top: Path) -> None:
    handle = volume.open("f", os.O_RDWR | os.O_CREAT, 0o644)
    log = volume.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    Cutting.cut_after = "fs.write"
    assert volume.write(handle, b"twice is as good as once", 0) == 24
    Cutting.cut_after = "fs.walk"
    assert volume.getattr("f").size == 24
    Cutting.then = server.forget
    Cutting.cut_after = "fs.write"
    assert errno_of(volume.write, log, b"once", 0) == errno.EIO  # appended or not: nobody knows
    for name, call in (("folder", volume.mkdir), ("file", volume.mknod)):
        Cutting.cut_after = "fs.make"
        assert errno_of(call, name, 0o755) == errno.EIO
    Cutting.cut_after = "fs.rename"
    assert errno_of(volume.rename, "f", "g") == errno.EIO
    Cutting.cut_after = "fs.create"
    assert errno_of(volume.open, "x", os.O_CREAT | os.O_EXCL | os.O_RDWR) == errno.EIO
    assert (top / "log").read_bytes() in (b"", b"once")
    assert volume.statfs().blocks > 0
