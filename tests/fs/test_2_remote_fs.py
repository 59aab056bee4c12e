# SPDX-License-Identifier: Apache-2.0
"""The volume over a connection: the same operations, and hostile peers."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, RemoteError
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.bulk_copy import EntriesPlus, unpack_page
from millpond.fs.server.connection import serve
from millpond.fs.vfs.inode_api import ROOT
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.wire.channel import Channel
from millpond.wire.framing import PREFIX, encode
from millpond.wire.messages import Failure

from .support import NAME, SLOT, SOON, Doing, Server, errno_of


@given(st.binary())
def test_any_bytes_are_a_listing_or_refused(data: bytes) -> None:
    try:
        found = list(unpack_page(data))
    except ProtocolError:
        return
    assert all(entry.name not in (b"", b".", b"..") and b"/" not in entry.name for entry in found)


def test_names_are_exchanged_or_left_as_they_are(tree: RemoteFs, top: Path) -> None:
    """As renameat2(2) does; the suites move names without its flags."""
    (top / "f").touch()
    (top / "d").mkdir()
    tree.rename(ROOT, b"f", ROOT, b"d", 2)
    assert (top / "f").is_dir() and (top / "d").is_file()
    assert errno_of(tree.rename, ROOT, b"f", ROOT, b"d", 1) == errno.EEXIST


def test_a_mebibyte_at_once_and_no_more(volume: PathAdapter) -> None:
    handle = volume.open("big", os.O_RDWR | os.O_CREAT, 0o644)
    data = os.urandom((1 << 20) + 17)
    assert volume.write(handle, data, 0) == 1 << 20
    assert volume.read(handle, 2 << 20, 0) == data[: 1 << 20]
    assert errno_of(volume.read, handle, -1, 0) == errno.EINVAL
    assert errno_of(volume.read, handle, 1, 1 << 80) == errno.EINVAL
    assert volume.read(handle, 4, 0) == data[:4]


def test_a_silent_server_does_not_hang_anybody() -> None:
    ends: list[socket.socket] = []

    def dial(_: Deadline) -> Channel:
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        return Channel(ours, "csd0")

    tree = RemoteFs(dial, timeout=0.3)
    start = time.monotonic()
    asking = [Doing(tree.statfs) for _ in range(4)]
    assert [errno_of(one.result) for one in asking] == [errno.ETIMEDOUT] * 4
    assert time.monotonic() - start < 3
    tree.close()
    for end in ends:
        end.close()


@pytest.mark.parametrize("welcomed", [False, True], ids=["at-once", "after-a-welcome"])
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
        encode(EntriesPlus(True), 3) + b"abc",
    ],
)
def test_a_hostile_server_gives_eio(answer: bytes, welcomed: bool) -> None:
    def dial(_: Deadline) -> Channel:
        ours, theirs = socket.socketpair()
        threading.Thread(target=_answer_with, args=(theirs, answer, welcomed), daemon=True).start()
        return Channel(ours, "csd0")

    tree = RemoteFs(dial, timeout=SOON)
    volume = PathAdapter(tree)
    assert errno_of(volume.readdir, "x") == errno.EIO
    assert errno_of(volume.open, "x", os.O_RDONLY) == errno.EIO
    assert errno_of(volume.getattr, "x") == errno.EIO
    assert errno_of(list, tree.readdir(tree.opendir(ROOT), 0)) == errno.EIO
    tree.close()


def _answer_with(sock: socket.socket, answer: bytes, welcomed: bool) -> None:
    with sock:
        sock.settimeout(SOON)
        with contextlib.suppress(OSError):
            sock.recv(1 << 16)
            if welcomed:
                sock.sendall(encode(p.SessionWelcome(1, 0, ROOT, 1.0)))
                sock.recv(1 << 16)
            sock.sendall(answer)
            sock.recv(1)


def _frame(head: bytes, payload: int = 0, size: int | None = None) -> bytes:
    return PREFIX.pack(b"mp", 1, len(head) if size is None else size, payload) + head


@pytest.mark.parametrize("greeted", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        _frame(b"\x93"),
        _frame(b"\x92\xa4nope\x80"),
        _frame(b"\x92\xa9fs.unlink\x80"),
        _frame(b"\x92\xa9fs.unlink\x82\xa6parent\xa1x\xa4name\x01"),
        _frame(b"", size=1 << 31),
        _frame(b"", size=0),
        encode(p.Write(1, 0), (1 << 20) + 1),
        encode(p.Write(1, 0), 1 << 50),
        encode(p.Remove(ROOT, b"f"), 5) + b"12345",
        encode(p.Done()),
        encode(p.Recalled(())),
        encode(p.Recall((1,), 1)),
        encode(Failure("x", "y")),
        os.urandom(1000),
    ],
)
def test_what_is_no_request_ends_the_connection(
    server: Server, top: Path, data: bytes, greeted: bool
) -> None:
    (top / "f").write_text("inside")
    hello = encode(p.SessionHello(NAME, SLOT)) if greeted else b""
    with server.raw() as sock:
        sock.settimeout(SOON)
        sock.sendall(hello + data)
        received = []
        with Channel(sock, "server") as channel, contextlib.suppress(ConnectionLost):
            while True:
                received.append(channel.receive(Deadline.after(SOON)).message.NAME)
    server.join()
    assert received in (["fs.welcome"] * greeted, [*["fs.welcome"] * greeted, "failure"])
    assert isinstance(server.ends[-1], ProtocolError)
    assert (top / "f").read_text() == "inside"


def test_an_idle_client_is_hung_up_on(server: Server) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        start = time.monotonic()
        assert isinstance(serve(Channel(theirs, "a client"), server.sessions, idle=0.1), RemoteError)
        assert time.monotonic() - start < 2


def test_a_connection_that_is_made_as_the_client_closes_is_closed(server: Server) -> None:
    """As by a thread that reclaims locks while the mount goes: the server would keep it for ever."""
    dialled, go = threading.Event(), threading.Event()

    def dial(deadline: Deadline) -> Channel:
        made = server.dial(deadline)
        dialled.set()
        assert go.wait(SOON)
        return made

    tree = RemoteFs(dial, timeout=SOON)
    asking = Doing(tree.statfs)
    assert dialled.wait(SOON)
    tree.close()
    go.set()
    with pytest.raises(OSError):
        asking.result()
    server.join()
