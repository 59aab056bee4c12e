# SPDX-License-Identifier: Apache-2.0
"""What a client has gathered and cannot write: its loss is told once; what need not be lost is not."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import SetAttr
from millpond.fs.vfs.path_api import Handle, os_error

from ..waiting import eventually
from .caching_client import Client, Device, make, restart
from .gathering_clients import client, close, device, no_room, patience, public, server, written
from .support import Cutting, Doing, Server, errno_of

__all__ = ["client", "device", "no_room", "patience", "public", "server"]
LOST = pytest.mark.expected_log("are lost that did not reach")


def refused(monkeypatch: pytest.MonkeyPatch, code: int, what: str = "write") -> None:
    """Whatever is written on the flash, or what else it does."""

    def fail(*_arguments: object, **_more: object) -> int:
        raise os_error(code)

    monkeypatch.setattr(BackingFs, what, fail)


@LOST
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
@pytest.mark.parametrize("how", ["close", "fsync", "write"])
def test_the_reason_of_a_loss_is_told_once_for_each_open_file(
    client: Client, public: Path, monkeypatch: pytest.MonkeyPatch, code: int, how: str
) -> None:
    node, handle = make(client, b"f")
    second = client.tree.open(node, os.O_RDONLY)
    assert client.gather(node, b"data")
    with monkeypatch.context() as full:
        refused(full, code)
        if how == "write":
            client.tree.write_behind.flush_node(node)
            assert not client.gather(node, b"more", 4)
    tries: dict[str, Callable[[Handle], object]] = {
        "close": client.tree.write_behind.close_descriptor,
        "fsync": lambda handle: client.tree.fsync(handle, False),
        "write": lambda handle: client.tree.write(handle, b"x", 0),
    }
    with monkeypatch.context() as full:
        if how != "write":
            refused(full, code)
        assert errno_of(tries[how], handle) == code
    assert errno_of(tries[how], handle) is None
    assert errno_of(client.tree.write_behind.close_descriptor, second) == code
    assert errno_of(client.tree.write_behind.close_descriptor, second) is None
    assert (public / "f").exists() and b"data" not in (public / "f").read_bytes()
    assert not client.tree.write_behind._dirty and not client.tree.write_behind._bytes
    eventually(lambda: (node, True) in client.kernel.dropped, "the kernel drops what was lost")


@pytest.mark.expected_log("attributes of a new file are not set")
@pytest.mark.parametrize("code", [errno.EPERM, errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
@pytest.mark.parametrize("how", ["close", "fsync"])
def test_attributes_that_are_refused_lose_no_data(
    client: Client, public: Path, monkeypatch: pytest.MonkeyPatch, code: int, how: str
) -> None:
    node, handle = written(client)
    second = client.tree.open(node, os.O_RDONLY)
    assert client.gather(node, b"more", 4)
    with monkeypatch.context() as refusing:
        refused(refusing, code, "setattr")
        assert client.tree.setattr(node, SetAttr(mode=0o604, mtime=5)).attributes.mtime == 5
        client.tree.write_behind.flush_node(node)
    assert (public / "f").read_bytes() == b"datamore" and not client.kernel.dropped
    known = client.tree.getattr(node).attributes
    assert stat.S_IMODE(known.mode) == 0o640 and known.mtime != 5
    assert client.gather(node, b"MORE", 4)  # it is no error of a write
    tries: dict[str, Callable[[Handle], object]] = {
        "close": client.tree.write_behind.close_descriptor,
        "fsync": lambda handle: client.tree.fsync(handle, False),
    }
    for each in (handle, second):
        assert [errno_of(tries[how], each) for _ in range(2)] == [code, None]
    assert (public / "f").read_bytes() == b"dataMORE" and not client.kernel.dropped
    client.tree.release(handle)


def cutting(client: Client) -> None:
    """Have all of its connections cut where a test says."""
    client.tree.rpc._dial = client.server.dial
    for lane in client.tree.rpc._all:
        lane._dial = client.server.dial
        lane.disconnect()


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_a_lost_answer_does_not_write_it_twice(client: Client, public: Path, flags: int) -> None:
    node, handle = make(client, b"f")
    cutting(client)
    assert client.gather(node, b"abc", 0, flags)
    Cutting.cut_after = "fs.gathered"
    Doing(close, client, handle, may_wait=False).result()
    assert Cutting.cut_after is None and (public / "f").read_bytes() == b"abc"


@LOST
@pytest.mark.expected_log("new names are lost")
@pytest.mark.parametrize("named", [True, False])
def test_a_server_that_was_restarted_has_lost_it(
    client: Client, server: Server, public: Path, named: bool
) -> None:
    _, handle = written(client)
    if named:
        client.tree.async_create.flush()
    restart(client)
    with contextlib.suppress(OSError):
        client.tree.async_create.flush()
    assert errno_of(client.tree.write_behind.close_descriptor, handle) == errno.EIO
    assert errno_of(client.tree.write_behind.close_descriptor, handle) is None
    assert not named or (public / "f").exists()
    assert not (public / "f").exists() or not (public / "f").stat().st_size


@LOST
@pytest.mark.expected_log("new names are lost")
def test_who_was_away_for_longer_than_the_lease_overwrites_nothing(
    client: Client, server: Server, device: Device, public: Path
) -> None:
    _, handle = written(client)
    client.tree.async_create.flush()
    server.refusing = True
    server.drop()
    device.put(b"f", b"other")
    server.refusing = False
    client.await_lease()
    assert errno_of(client.tree.write_behind.close_descriptor, handle) == errno.EIO
    assert (public / "f").read_bytes() == b"other"


def test_what_nobody_missed_is_written_after_the_lease(client: Client, public: Path) -> None:
    client.gate.shut("fs.recall")
    client.gate.reached()
    node, _ = written(client)
    eventually(lambda: not client.gather(node, b"more", 4), "the lease is over")
    client.gate.open()
    eventually((public / "f").exists, "its name is sent")
    eventually(lambda: (public / "f").read_bytes().startswith(b"data"), "it is sent")


def test_a_server_that_cannot_be_reached_loses_nothing_yet(
    client: Client, server: Server, public: Path
) -> None:
    _, handle = written(client)
    for lane in client.tree.rpc._all:
        lane.disconnect()
    server.refusing = True
    assert errno_of(client.tree.write_behind.close_descriptor, handle) == errno.EIO
    server.refusing = False
    client.tree.write_behind.close_descriptor(handle)
    assert (public / "f").read_bytes() == b"data"
