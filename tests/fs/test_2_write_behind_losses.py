# SPDX-License-Identifier: Apache-2.0
"""What a client has gathered and cannot write: its loss is told once; what need not be lost is not."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.fs.client import write_behind
from millpond.fs.client.session import now
from millpond.fs.coherence.lease_file import open_leases
from millpond.fs.vfs.inode_api import SetAttr
from millpond.fs.vfs.path_api import Handle

from ..waiting import eventually
from .caching_client import LONG_LEASE, Client, Device, make, restart, shared
from .gathering_clients import LEASE, client, close, device, patience, public, server, written
from .support import Cutting, Doing, Held, Server, errno_of, lasts

__all__ = ["client", "device", "patience", "public", "server"]
LOST = pytest.mark.expected_log("are lost that did not reach")


@LOST
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
@pytest.mark.parametrize("how", ["close", "fsync", "write"])
def test_the_reason_of_a_loss_is_told_once_for_each_open_file(
    client: Client, server: Server, public: Path, code: int, how: str
) -> None:
    node, handle = make(client, b"f")
    second = client.tree.open(node, os.O_RDONLY)
    assert client.gather(node, b"data")
    if how == "write":
        with server.tree.refusing(code):
            client.tree.write_behind.flush_all()
            assert not client.gather(node, b"more", 4)
    tries: dict[str, Callable[[Handle], object]] = {
        "close": client.tree.write_behind.close_descriptor,
        "fsync": lambda handle: client.tree.fsync(handle, False),
        "write": lambda handle: client.tree.write(handle, b"x", 0),
    }
    with server.tree.refusing(code) if how != "write" else contextlib.nullcontext():
        assert errno_of(tries[how], handle) == code
    assert errno_of(tries[how], handle) is None
    ends = [errno_of(client.tree.write_behind.close_descriptor, handle) for _ in range(2)]
    assert ends == [code if how == "write" else None, None]  # the kernel may keep a write's error to itself
    assert errno_of(client.tree.write_behind.close_descriptor, second) == code
    assert errno_of(client.tree.write_behind.close_descriptor, second) is None
    assert (public / "f").exists() and b"data" not in (public / "f").read_bytes()
    eventually(lambda: (node, True) in client.kernel.dropped, "the kernel drops what was lost")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
@pytest.mark.parametrize("how", ["close", "fsync"])
def test_attributes_that_are_refused_are_told_and_lose_no_data(
    client: Client, server: Server, public: Path, code: int, how: str
) -> None:
    node, handle = written(client)
    second = client.tree.open(node, os.O_RDONLY)
    assert client.gather(node, b"more", 4)
    with server.tree.refusing(code, "setattr"):
        assert client.tree.setattr(node, SetAttr(mode=0o604, mtime=5)).attributes.mtime == 5
        assert client.gather(node, b"!", 8)
        client.tree.write_behind.flush_all()
    assert (public / "f").read_bytes() == b"datamore!"
    known = client.tree.getattr(node).attributes
    assert stat.S_IMODE(known.mode) == 0o640 and known.mtime != 5
    tries: dict[str, Callable[[Handle], object]] = {
        "close": client.tree.write_behind.close_descriptor,
        "fsync": lambda handle: client.tree.fsync(handle, False),
    }
    told = errno.EIO if code == errno.ESTALE else code
    for each in (handle, second):
        assert [errno_of(tries[how], each) for _ in range(2)] == [told, None]
    client.tree.release(handle)


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_a_lost_answer_does_not_write_it_twice(client: Client, public: Path, flags: int) -> None:
    node, handle = make(client, b"f")
    assert client.gather(node, b"abc", 0, flags)
    Cutting.cut_after = "fs.write"
    Doing(close, client, handle).result()
    assert Cutting.cut_after is None and (public / "f").read_bytes() == b"abc"


@LOST
def test_what_may_have_been_appended_is_not_appended_again(
    client: Client, server: Server, public: Path
) -> None:
    node, handle = make(client, b"f")
    assert client.gather(node, b"abc", 0, os.O_WRONLY | os.O_APPEND)
    Cutting.cut_after = "fs.write"
    Cutting.then = staticmethod(lambda: setattr(server, "refusing", True))
    assert errno_of(client.tree.write_behind.flush_all) == errno.EIO and Cutting.cut_after is None
    Cutting.then = staticmethod(lambda: None)
    restart(client)
    assert errno_of(client.tree.write_behind.close_descriptor, handle) == errno.EIO
    assert (public / "f").read_bytes() == b"abc"


def test_a_lookup_after_a_restart_sees_the_data_that_the_writer_sends_again(
    client: Client, server: Server, device: Device
) -> None:
    other = Client(server)
    _, handle = written(client)
    client.away = server.refusing = True
    server.crash()
    server.refusing = False
    eventually(other.attended, "the other has a lease")
    looking = [
        Doing(other.find, b"f"),
        Doing(device.find, b"f"),
        Doing(other.tree.lookup, other.public, b"f"),
    ]
    assert lasts(lambda: not any(each.done for each in looking))
    client.away = False
    assert other.size(looking[0].result()) == 4
    assert device.tree.getattr(looking[1].result()).attributes.size == 4
    assert looking[2].result().attributes.size == 4
    client.tree.release(handle)
    other.close()


@LOST
def test_a_writer_that_the_server_forgot_overwrites_nothing(
    client: Client, server: Server, device: Device, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, handle = written(client)
    server.refusing = True
    server.restart()
    device.put(b"f", b"other")  # which the next server allows once the lease is over
    monkeypatch.setattr(write_behind, "now", lambda: now() + LEASE)
    server.refusing = False
    client.await_lease()
    tries = [errno_of(client.tree.write_behind.close_descriptor, handle) for _ in range(2)]
    assert tries == [errno.EIO, None] and (public / "f").read_bytes() == b"other"


def test_a_server_that_cannot_be_reached_loses_nothing_yet(
    client: Client, server: Server, public: Path
) -> None:
    _, handle = written(client)
    client.hang_up()
    server.refusing = True
    assert errno_of(client.tree.write_behind.close_descriptor, handle) == errno.EIO
    server.refusing = False
    client.tree.write_behind.close_descriptor(handle)
    assert (public / "f").read_bytes() == b"data"


@LOST
def test_a_writer_that_cannot_send_at_a_recall_overwrites_nothing(
    client: Client, server: Server, device: Device, public: Path
) -> None:
    _, handle = written(client)
    client.hang_up()
    server.refusing = True  # but the connection for recalls stays
    device.does(b"f", b"other").result()
    server.refusing = False
    client.await_lease()
    assert errno_of(client.tree.write_behind.close_descriptor, handle) == errno.EIO
    assert (public / "f").read_bytes() == b"other"


@LOST
def test_a_writer_that_could_not_send_at_a_recall_overwrites_nothing_after_a_restart(
    client: Client, server: Server, device: Device, public: Path
) -> None:
    """The next server does not know that somebody has changed the file."""
    _, handle = written(client)
    client.hang_up()
    server.refusing = True
    device.does(b"f", b"other").result()
    server.crash()
    server.refusing = False
    client.await_lease()
    assert errno_of(client.tree.write_behind.close_descriptor, handle) == errno.EIO
    assert (public / "f").read_bytes() == b"other"


def test_a_writer_that_waits_for_the_server_at_a_recall_keeps_nothing_past_the_lease(
    server: Server, device: Device, patience: None
) -> None:
    client = Client(server, 100.0)
    node, handle = written(client)
    writing = Held(server.tree, "write")
    looking = Doing(device.find, b"f")
    eventually(lambda: (node, True) in client.kernel.dropped, "the kernel keeps nothing")
    writing.go_on.set()
    assert looking.result()
    close(client, handle)
    client.close()


@LOST
def test_a_flash_that_hangs_holds_the_unmount_up_once_for_all_files(server: Server, patience: None) -> None:
    client = Client(server, timeout=1.0)
    for name in (b"f", b"g", b"h"):
        written(client, name)
    writing, before = Held(server.tree, "write"), time.monotonic()
    client.tree.write_behind.close()
    assert time.monotonic() - before < 2.0
    writing.go_on.set()
    client.close()


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_RDONLY])
def test_files_that_are_open_are_held_again_at_the_end_of_the_grace_period(
    client: Client, server: Server, device: Device, public: Path, flags: int
) -> None:
    (public / "f").write_bytes(b"mine")
    handle, number = client.tree.open(client.find(b"f"), flags), (public / "f").stat().st_ino
    names = [f"g{count}" for count in range(20)]  # ext4 gives the first of them the number

    def replace() -> None:
        with device.write_intent(public.stat().st_ino, inodes=(number,)):
            (public / "f").unlink()
            for name in names:
                (public / name).write_bytes(b"other")

    server.refusing = True
    server.crash()
    replacing = Doing(replace)
    server.refusing = False
    replacing.result()
    for name in names:
        client.find(name.encode())
    assert bytes(client.tree.read(handle, 9, 0)) == b"mine"
    if flags == os.O_RDWR:
        client.tree.write(handle, b"MINE", 0)
    assert all((public / name).read_bytes() == b"other" for name in names)


@pytest.mark.parametrize("gathers", [False, True], ids=["open", "gathered"])
def test_hosts_that_are_back_at_once_do_not_wait_for_each_other(
    tmp_path: Path, patience: None, gathers: bool
) -> None:
    leases = open_leases(tmp_path / "leases")
    with shared(tmp_path, LONG_LEASE, leases) as served:
        clients = [Client(served, LONG_LEASE) for _ in range(2)]
        for number, client in enumerate(clients):
            node, _ = make(client, b"%d" % number)
            assert not gathers or client.gather(node, b"data")
        served.refusing = True
        served.crash()
        served.refusing, began = False, time.monotonic()
        for client in clients:
            eventually(client.attended, "the host is back", 2 * LONG_LEASE)
        assert time.monotonic() - began < LONG_LEASE / 2
        for client in clients:
            client.close()
        assert not gathers or all((tmp_path / "public" / name).read_bytes() == b"data" for name in "01")
    os.close(leases)
