"""The volume over a connection: the same operations, lost connections, hostile peers."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.fs import protocol as p
from millpond.fs.client import RemoteVolume
from millpond.fs.operations import Operations
from millpond.fs.server import serve
from millpond.fs.sessions import Sessions
from millpond.fs.volume import Attributes, Entry, Handle
from millpond.wire.channel import Channel
from millpond.wire.deadline import Deadline
from millpond.wire.errors import ConnectionLost, ProtocolError, RemoteError
from millpond.wire.frame import PREFIX, encode
from millpond.wire.message import Failure, Message

SOON = 5.0


def errno_of(call: Callable[..., object], *arguments: object) -> int | None:
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
    return None


class Cutting(Channel):
    """A channel that cuts its connection before or after the request whose name it is told."""

    cut_before: str | None = None
    cut_after: str | None = None
    cut_after_that: str | None = None
    then: Callable[[], None] = staticmethod(lambda: None)

    def send(
        self, message: Message, deadline: Deadline, payload: bytes | bytearray | memoryview = b""
    ) -> None:
        if self.cut_before == message.NAME:
            self.sock.shutdown(socket.SHUT_RDWR)
            raise ConnectionLost("cut before it was sent")
        super().send(message, deadline, payload)
        if self.cut_after == message.NAME:
            Cutting.cut_after, Cutting.cut_after_that = Cutting.cut_after_that, None  # this once
            self.sock.recv(1 << 21)  # it is done, but nobody hears of it
            self.sock.shutdown(socket.SHUT_RDWR)
            Cutting.then()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection: unlike a Unix one, it takes data that nobody will ever read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


class Server:
    """A server with a thread for each connection."""

    def __init__(self, top: Path) -> None:
        self.root = os.open(top, os.O_PATH | os.O_DIRECTORY)
        self.volume = Operations(self.root)
        self.sessions = Sessions(self.volume)
        self.threads: list[threading.Thread] = []
        self.channels: list[Channel] = []
        self.ends: list[RemoteError | None] = []
        self.dialled = 0
        self.refusing = False

    def raw(self) -> socket.socket:
        """A connection, its client's end."""
        ours, theirs = _tcp_pair()
        channel = Channel(theirs, "a client")
        self.channels.append(channel)
        thread = threading.Thread(target=lambda: self.ends.append(serve(channel, self.sessions)), daemon=True)
        thread.start()
        self.threads.append(thread)
        return ours

    def dial(self, _deadline: Deadline) -> Channel:
        self.dialled += 1
        if self.refusing:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody there")
        return Cutting(self.raw(), "csd0")

    def drop(self) -> None:
        """Cut all connections, from the server's side, and wait until it has cleaned up."""
        for channel in self.channels:
            with contextlib.suppress(OSError):  # it has ended already
                channel.sock.shutdown(socket.SHUT_RDWR)
        self.join()

    def restart(self) -> None:
        """Cut all connections, and forget all clients."""
        self.drop()
        self.forget()

    def forget(self) -> None:
        """Remember no client."""
        self.sessions.close()
        self.sessions = Sessions(self.volume)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(SOON)
            assert not thread.is_alive()
        self.threads.clear()
        self.channels.clear()


@pytest.fixture
def top(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    directory.mkdir()
    return directory


@pytest.fixture
def server(top: Path) -> Iterator[Server]:
    made = Server(top)
    yield made
    Cutting.cut_before = Cutting.cut_after = Cutting.cut_after_that = None
    Cutting.then = staticmethod(lambda: None)
    made.drop()
    made.sessions.close()
    os.close(made.root)


@pytest.fixture
def volume(server: Server) -> Iterator[RemoteVolume]:
    made = RemoteVolume(server.dial, timeout=SOON)
    yield made
    made.close()


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
    (top.parent / "secret").write_text("outside")
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
