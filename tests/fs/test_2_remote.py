"""The volume over a connection: the same operations, hostile peers."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.fs import protocol as p
from millpond.fs.client import RemoteVolume
from millpond.fs.server import serve
from millpond.fs.volume import Attributes, Entry, Handle
from millpond.wire.channel import Channel
from millpond.wire.deadline import Deadline
from millpond.wire.errors import ConnectionLost, ProtocolError, RemoteError
from millpond.wire.frame import PREFIX, encode
from millpond.wire.message import Failure, Message

from .support import SOON, Server, errno_of

names = st.text(min_size=1).filter(lambda n: not set(n) & set("/\0") and n not in (".", ".."))
words = st.integers(0, (1 << 32) - 1)


@given(
    st.lists(st.builds(Entry, names.filter(lambda n: n.isprintable()), st.integers(0, (1 << 64) - 1), words))
)
def test_listings_survive_packing(entries: list[Entry]) -> None:
    assert p.unpack_entries(p.pack_entries(entries)) == tuple(entries)


@given(st.binary())
def test_any_bytes_are_a_listing_or_refused(data: bytes) -> None:
    try:
        found = p.unpack_entries(data)
    except ProtocolError:
        return
    assert all(entry.name not in ("", ".", "..") and "/" not in entry.name for entry in found)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"../x", b"a\0"])
def test_names_that_no_file_has_are_refused(name: bytes) -> None:
    with pytest.raises(ProtocolError):
        p.unpack_entries(p._ENTRY.pack(1, 0, len(name)) + name)


def test_every_operation_crosses(volume: RemoteVolume, top: Path) -> None:
    volume.mkdir("d", 0o755)
    handle = volume.open("d/f", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
    assert volume.write(handle, b"hello", 3) == 5
    assert volume.read(handle, 100, 0) == b"\0\0\0hello"
    volume.ftruncate(handle, 4)
    assert isinstance(volume.fgetattr(handle), Attributes)
    assert volume.fgetattr(handle).size == 4
    volume.flush(handle)
    volume.fsync(handle)
    volume.fsync(handle, data_only=True)
    volume.release(handle)
    volume.truncate("d/f", 1)
    volume.chmod("d/f", 0o600)
    volume.utimens("d/f", 5, 1_500_000_000_123_456_789)
    volume.chown("d/f", -1, -1)
    volume.link("d/f", "d/g")
    volume.symlink("anywhere/\udcff", "d/l")
    volume.mknod("d/n", stat.S_IFREG | 0o644)
    found = volume.getattr("d/g")
    assert (found.size, found.links, found.mtime, found.mode & 0o7777) == (
        1,
        2,
        1_500_000_000_123_456_789,
        0o600,
    )
    assert volume.readlink("d/l") == "anywhere/\udcff"
    assert {entry.name for entry in volume.readdir("d")} == {"f", "g", "l", "n"}
    volume.rename("d/n", "d/m")
    for name in ("f", "g", "l", "m"):
        volume.unlink(f"d/{name}")
    volume.rmdir("d")
    assert volume.statfs().blocks > 0
    assert list(top.iterdir()) == []
    assert errno_of(volume.getattr, "d") == errno.ENOENT


def test_a_mebibyte_at_once_and_no_more(volume: RemoteVolume) -> None:
    handle = volume.open("big", os.O_RDWR | os.O_CREAT, 0o644)
    data = os.urandom((1 << 20) + 17)
    assert volume.write(handle, data, 0) == 1 << 20
    assert volume.read(handle, 2 << 20, 0) == data[: 1 << 20]
    assert errno_of(volume.read, handle, -1, 0) == errno.EINVAL
    assert errno_of(volume.read, handle, 1, 1 << 80) == errno.EINVAL
    assert volume.read(handle, 4, 0) == data[:4]


def test_a_large_directory(volume: RemoteVolume, top: Path) -> None:
    for number in range(20_000):
        os.mknod(top / f"a-long-name-to-fill-more-than-one-head-{number:06}")
    assert len(volume.readdir("")) == 20_000


def test_a_silent_server_does_not_hang_anybody() -> None:
    ends: list[socket.socket] = []

    def dial(_: Deadline) -> Channel:
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        return Channel(ours, "csd0")

    volume = RemoteVolume(dial, timeout=0.3)
    start = time.monotonic()
    threads = [threading.Thread(target=errno_of, args=(volume.statfs,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert errno_of(volume.getattr, "x") == errno.ETIMEDOUT
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 3
    volume.close()
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        encode(p.Done()),
        encode(p.Data(), 1 << 40),
        encode(p.Data(), (64 << 20) + 1),
        encode(Failure("no", "go away")),
        encode(p.Error(-5)),
        encode(p.Error(1 << 40)),
        encode(p.Entries(), 3) + b"abc",
    ],
)
def test_a_hostile_server_gives_eio(answer: bytes) -> None:
    def dial(_: Deadline) -> Channel:
        ours, theirs = socket.socketpair()
        threading.Thread(target=_answer_with, args=(theirs, answer), daemon=True).start()
        return Channel(ours, "csd0")

    volume = RemoteVolume(dial, timeout=SOON)
    assert errno_of(volume.readdir, "x") == errno.EIO
    assert errno_of(volume.open, "x", os.O_RDONLY) == errno.EIO
    assert errno_of(volume.getattr, "x") == errno.EIO
    volume.close()


def _answer_with(sock: socket.socket, answer: bytes) -> None:
    with sock:
        sock.recv(1 << 16)
        sock.sendall(answer)
        sock.settimeout(SOON)
        with contextlib.suppress(OSError):
            sock.recv(1)


HOSTILE = [
    p.GetAttributes(b".."),
    p.GetAttributes(b"/etc/passwd"),
    p.ReadDirectory(b"../.."),
    p.ReadLink(b"a\0b"),
    p.MakeNode(b"../x", 0o644),
    p.MakeNode(b"x", -1),
    p.MakeNode(b"x", stat.S_IFDIR | 0o755),
    p.MakeNode(b"x", stat.S_IFCHR | 0o666, rdev=-1),
    p.MakeNode(b"x", stat.S_IFCHR | 0o666, rdev=(1 << 64) - 1),
    p.MakeDirectory(b"d/../../x", 0o755),
    p.MakeDirectory(b"y", -(1 << 63)),
    p.MakeSymlink(b"a\0b", b"l"),
    p.MakeSymlink(b"x", b"../l"),
    p.Rename(b"f", b"../f"),
    p.Rename(b"", b"f"),
    p.MakeLink(b"../secret", b"s"),
    p.ChangeMode(b"f", 1 << 63),
    p.ChangeOwner(b"f", -5, 1 << 60),
    p.Truncate(b"f", -1),
    p.Truncate(b"f", (1 << 64) - 1),
    p.SetTimes(b"../f", 1 << 63, -(1 << 63)),
    p.SetTimes(b"g", 1 << 63, -(1 << 63)),
    p.Open(b"../secret", os.O_RDONLY),
    p.Open(b"f", -1),
    p.Open(b"f", 1 << 63),
    p.Open(b"new", os.O_CREAT, -1),
    p.Open(b"f" * 70_000, os.O_RDONLY),
    p.Read(0, 1, 0),
    p.Read(-1, 1, 0),
    p.Read(1 << 63, 1, 0),
    p.Write(7, 0),
    p.Sync(99, True),
    p.Release(99),
    p.TruncateOpen(99, 0),
    p.GetOpenAttributes(99),
]


@pytest.mark.parametrize("request_", HOSTILE, ids=lambda r: f"{r.NAME}")
def test_hostile_requests_are_refused_and_the_next_is_served(
    server: Server, top: Path, request_: Message
) -> None:
    (top / "f").write_text("inside")
    with Channel(server.raw(), "server") as channel:
        deadline = Deadline.after(SOON)
        channel.send(request_, deadline)
        head = channel.receive(deadline)
        assert isinstance(head.message, p.Error), head
        assert p.known_errno(head.message.errno) == head.message.errno
        assert channel.call(p.GetAttributes(b"f"), p.AttributesAre, deadline).attributes.size == 6
    assert sorted(path.name for path in top.parent.iterdir()) == ["root", "secret"]


def test_absurd_numbers_on_an_open_file(server: Server, top: Path) -> None:
    (top / "f").write_text("inside")
    with Channel(server.raw(), "server") as channel:
        deadline = Deadline.after(SOON)
        handle = channel.call(p.Open(b"f", os.O_RDWR), p.Opened, deadline).handle
        for number in (-1, -(1 << 63), 1 << 63, (1 << 64) - 1):
            for request in (
                p.Read(handle, 1, number),
                p.Write(handle, number),
                p.TruncateOpen(handle, number),
            ):
                channel.send(request, deadline)
                assert channel.receive(deadline).message == p.Error(errno.EINVAL)
        channel.send(p.Read(handle, 1 << 62, 0), deadline)
        assert channel.receive(deadline).payload_size == 6


def _frame(head: bytes, payload: int = 0, size: int | None = None) -> bytes:
    return PREFIX.pack(b"mp", 1, len(head) if size is None else size, payload) + head


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        _frame(b"\x93"),
        _frame(b"\x92\xa4nope\x80"),
        _frame(b"\x92\xa9fs.unlink\x80"),
        _frame(b"\x92\xa9fs.unlink\x81\xa4path\x01"),
        _frame(b"", size=1 << 31),
        _frame(b"", size=0),
        encode(p.Write(1, 0), (1 << 20) + 1),
        encode(p.Write(1, 0), 1 << 50),
        encode(p.Unlink(b"f"), 5) + b"12345",
        encode(p.Done()),
        encode(Failure("x", "y")),
        os.urandom(1000),
    ],
)
def test_what_is_no_request_ends_the_connection(server: Server, top: Path, data: bytes) -> None:
    (top / "f").write_text("inside")
    with server.raw() as sock:
        sock.settimeout(SOON)
        sock.sendall(data)
        received = b""
        with Channel(sock, "server") as channel, contextlib.suppress(ConnectionLost):
            received = channel.receive(Deadline.after(SOON)).message.NAME.encode()
    server.join()
    assert received in (b"failure", b"")
    assert isinstance(server.ends[-1], ProtocolError)
    assert (top / "f").read_text() == "inside"


def test_files_end_with_the_connection_and_belong_to_it(server: Server, top: Path) -> None:
    (top / "f").write_text("inside")
    deadline = Deadline.after(SOON)
    one, two = Channel(server.raw(), "server"), Channel(server.raw(), "server")
    handle = one.call(p.Open(b"f", os.O_RDONLY), p.Opened, deadline).handle
    two.send(p.Read(handle, 1, 0), deadline)
    assert two.receive(deadline).message == p.Error(errno.EBADF)
    one.close()
    two.close()
    server.join()
    assert server.ends == [None, None]
    assert errno_of(server.volume.release, Handle(handle)) == errno.EBADF


def test_an_idle_client_is_hung_up_on(server: Server) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        start = time.monotonic()
        assert isinstance(serve(Channel(theirs, "a client"), server.sessions, idle=0.1), RemoteError)
        assert time.monotonic() - start < 2
