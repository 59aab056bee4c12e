"""The volume over connections that are lost: nothing is done twice, and what is open stays so."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.fs import protocol as p
from millpond.fs.client import RemoteVolume
from millpond.fs.sessions import Sessions
from millpond.fs.volume import Handle
from millpond.wire.channel import Channel
from millpond.wire.deadline import Deadline
from millpond.wire.errors import ConnectionLost
from millpond.wire.message import Failure, Message

from .support import SOON, Cutting, Server, errno_of


def test_lost_between_two_operations(volume: RemoteVolume, server: Server, top: Path) -> None:
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
    assert server.volume.fgetattr(Handle(1)).links == 0
    volume.statfs()
    assert errno_of(server.volume.fgetattr, Handle(1)) == errno.EBADF
    assert server.dialled == 7


def test_a_server_that_was_started_again(volume: RemoteVolume, server: Server, top: Path) -> None:
    handle = volume.open("f", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    volume.write(handle, b"hello", 0)
    server.restart()
    assert volume.read(handle, 5, 0) == b"hello"  # opened again, and not created, emptied or refused
    server.restart()
    volume.mkdir("d", 0o755)
    server.restart()
    volume.rename("f", "d/f")
    server.restart()
    assert volume.write(handle, b"H", 0) == 1  # found under its new name
    assert (top / "d" / "f").read_bytes() == b"Hello"


def test_lost_before_sending(volume: RemoteVolume, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    volume.statfs()
    first = volume._connection._channel
    monkeypatch.setattr(first, "cut_before", "fs.mkdir", raising=False)
    volume.mkdir("d", 0o755)
    assert server.dialled == 2


def test_nothing_is_done_twice(volume: RemoteVolume, server: Server, top: Path) -> None:
    log = volume.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("fs.write", lambda: volume.write(log, b"once", 0)),
        ("fs.mkdir", lambda: volume.mkdir("d", 0o755)),
        ("fs.mknod", lambda: volume.mknod("n", 0o644)),
        ("fs.rename", lambda: volume.rename("n", "m")),
        ("fs.link", lambda: volume.link("m", "d/l")),
        ("fs.symlink", lambda: volume.symlink("m", "s")),
        ("fs.open", lambda: volume.release(volume.open("x", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))),
        ("fs.unlink", lambda: volume.unlink("m")),
        ("fs.unlink", lambda: volume.unlink("d/l")),
        ("fs.rmdir", lambda: volume.rmdir("d")),
    ]
    for name, call in calls:
        Cutting.cut_after = name
        call()
        assert Cutting.cut_after is None
    Cutting.cut_after = "fs.unlink"
    assert errno_of(volume.unlink, "m") == errno.ENOENT  # a failure is told again as well
    assert (top / "log").read_bytes() == b"once"
    assert sorted(os.listdir(top)) == ["log", "s", "x"]  # noqa: PTH208
    assert server.dialled == len(calls) + 2
    volume.release(log)


def test_a_reply_that_is_lost_more_than_once(volume: RemoteVolume, server: Server, top: Path) -> None:
    volume.statfs()
    Cutting.cut_after = "fs.mkdir"
    Cutting.cut_after_that = "fs.again"
    volume.mkdir("d", 0o755)
    assert Cutting.cut_after is None and Cutting.cut_after_that is None
    assert (top / "d").is_dir() and server.dialled == 3


def test_a_release_that_is_lost_twice_is_not_taken_for_another_request(
    volume: RemoteVolume, server: Server, top: Path
) -> None:
    handle = volume.open("f", os.O_RDWR | os.O_CREAT, 0o644)
    (top / "gone").mkdir()
    Cutting.cut_after = "fs.release"
    volume.release(handle)  # performed, but nobody hears of it
    assert Cutting.cut_after is None
    Cutting.lose = "fs.release"
    volume.rmdir("gone")
    assert Cutting.lose is None
    assert not (top / "gone").exists()
    assert errno_of(server.volume.fgetattr, Handle(1)) == errno.EBADF


def test_what_was_done_is_not_done_again_though_it_might(
    volume: RemoteVolume, server: Server, top: Path
) -> None:
    volume.release(volume.open("f", os.O_RDWR | os.O_CREAT, 0o644))
    Cutting.then = lambda: (top / "f").write_text(
        "the device's"
    )  # between a lost reply and the next connection
    Cutting.cut_after = "fs.truncate"
    volume.truncate("f", 0)
    assert (top / "f").read_text() == "the device's"
    Cutting.cut_after = "fs.open"
    handle = volume.open("f", os.O_RDWR | os.O_TRUNC)
    assert (top / "f").read_text() == "the device's"
    volume.release(handle)
    assert [number for number in range(9) if errno_of(server.volume.fgetattr, Handle(number)) is None] == []


def test_a_client_has_so_many_files_open_and_no_more(volume: RemoteVolume, top: Path) -> None:
    (top / "f").touch()
    handles = [volume.open("f", os.O_RDONLY) for _ in range(4096)]
    assert errno_of(volume.open, "f", os.O_RDONLY) == errno.EMFILE
    volume.release(handles.pop())
    volume.open("f", os.O_RDONLY)


def test_what_arrives_late_over_an_earlier_connection_is_not_done(server: Server, top: Path) -> None:
    deadline, hello = Deadline.after(SOON), p.Hello(b"a client's name.")
    first, second = Channel(server.raw(), "server"), Channel(server.raw(), "server")
    with first, second:
        assert first.call(hello, p.Welcome, deadline) == p.Welcome(False, 0)
        first.call(p.MakeDirectory(b"d", 0o755), p.Done, deadline)
        assert second.call(hello, p.Welcome, deadline) == p.Welcome(True, 1)
        with contextlib.suppress(ConnectionLost):
            first.send(p.MakeDirectory(b"late", 0o755), deadline)
            first.receive(deadline)
        assert second.call(p.Again(), p.Done, deadline) == p.Done()
        second.call(p.RemoveDirectory(b"d"), p.Done, deadline)
    assert os.listdir(top) == []  # noqa: PTH208


def test_sessions_end(server: Server, top: Path) -> None:
    (top / "f").write_text("inside")
    deadline, name = Deadline.after(4 * SOON), b"a client's name."

    def connected() -> Channel:
        channel = Channel(server.raw(), "server")
        channel.send(p.Hello(name), deadline)
        return channel

    def opened(channel: Channel) -> Handle:
        return Handle(channel.call(p.Open(b"f", os.O_RDONLY), p.Opened, deadline).handle)

    with connected() as channel:
        assert channel.expect(p.Welcome, deadline) == p.Welcome(False, 0)
        handle = opened(channel)
        channel.call(p.Goodbye(), p.Done, deadline)
    server.join()
    assert errno_of(server.volume.fgetattr, handle) == errno.EBADF
    server.sessions = Sessions(server.volume, keep=2.0)
    with connected() as channel:
        assert channel.expect(p.Welcome, deadline) == p.Welcome(False, 0)
        handle = opened(channel)
    server.join()
    with connected() as channel:  # in time
        assert channel.expect(p.Welcome, deadline) == p.Welcome(True, 1)
        time.sleep(2.5)
        assert server.volume.fgetattr(handle).size == 6
    server.join()
    end = time.monotonic() + SOON
    while errno_of(server.volume.fgetattr, handle) is None and time.monotonic() < end:
        time.sleep(0.01)
    assert errno_of(server.volume.fgetattr, handle) == errno.EBADF
    with connected() as channel:
        assert channel.expect(p.Welcome, deadline) == p.Welcome(False, 0)


def test_there_are_not_any_number_of_sessions(server: Server) -> None:
    deadline = Deadline.after(SOON)

    def answer(number: int) -> Message:
        with Channel(server.raw(), "server") as channel:
            channel.send(p.Hello(b"%16d" % number), deadline)
            message = channel.receive(deadline).message
        server.threads[-1].join(SOON)  # now the server knows that it is away
        return message

    kept = [Channel(server.raw(), "server") for _ in range(63)]
    for number, channel in enumerate(kept):
        channel.call(p.Hello(b"%16d" % number), p.Welcome, deadline)
    assert answer(100) == answer(101) == p.Welcome(False, 0)  # who is away makes room
    kept.append(Channel(server.raw(), "server"))
    kept[-1].call(p.Hello(b"%16d" % 102), p.Welcome, deadline)
    assert isinstance(answer(103), Failure)
    for name in (b"", b"short", bytes(17)):
        with Channel(server.raw(), "server") as channel:
            channel.send(p.Hello(name), deadline)
            assert isinstance(channel.receive(deadline).message, Failure)
    for channel in kept:
        channel.close()


def test_lost_in_the_middle(volume: RemoteVolume, server: Server, top: Path) -> None:
    handle = volume.open("f", os.O_RDWR | os.O_CREAT, 0o644)
    log = volume.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    Cutting.cut_after = "fs.write"
    assert volume.write(handle, b"twice is as good as once", 0) == 24
    Cutting.cut_after = "fs.getattr"
    assert volume.getattr("f").size == 24
    Cutting.then = server.forget
    Cutting.cut_after = "fs.write"
    assert errno_of(volume.write, log, b"once", 0) == errno.EIO  # appended or not: nobody knows
    for name, call in (("fs.mkdir", volume.mkdir), ("fs.mknod", volume.mknod)):
        Cutting.cut_after = name
        assert errno_of(call, name, 0o755) == errno.EIO
    Cutting.cut_after = "fs.rename"
    assert errno_of(volume.rename, "f", "g") == errno.EIO
    Cutting.cut_after = "fs.open"
    assert errno_of(volume.open, "x", os.O_CREAT | os.O_EXCL | os.O_RDWR) == errno.EIO
    assert (top / "log").read_bytes() in (b"", b"once")
    assert volume.statfs().blocks > 0


def test_fsync_does_not_promise_what_may_be_gone(volume: RemoteVolume, server: Server) -> None:
    handle = volume.open("f", os.O_RDWR | os.O_CREAT, 0o644)
    volume.write(handle, b"1", 0)
    server.drop()
    volume.fsync(handle)  # the server lives: it has what was written
    server.restart()
    volume.fsync(handle)  # nothing was outstanding
    volume.write(handle, b"2", 0)
    server.restart()
    volume.write(handle, b"3", 1)
    assert errno_of(volume.fsync, handle) == errno.EIO
    volume.fsync(handle)


def test_another_file_of_the_same_name_is_not_mistaken(
    volume: RemoteVolume, server: Server, top: Path
) -> None:
    handles = [volume.open(name, os.O_RDWR | os.O_CREAT, 0o644) for name in ("f", "g")]
    (top / "other").write_text("other")
    (top / "other").rename(top / "f")
    (top / "g").unlink()
    server.restart()
    for handle in handles:
        assert errno_of(volume.read, handle, 5, 0) == errno.ESTALE
        volume.release(handle)
    server.restart()
    assert errno_of(volume.read, handles[0], 1, 0) == errno.EBADF


def test_nobody_there(volume: RemoteVolume, server: Server) -> None:
    handle = volume.open("f", os.O_RDWR | os.O_CREAT, 0o644)
    server.drop()
    server.refusing = True
    assert errno_of(volume.getattr, "f") == errno.EIO
    assert errno_of(volume.read, handle, 1, 0) == errno.EIO
    volume.release(handle)
    server.refusing = False
    assert volume.getattr("f").size == 0
