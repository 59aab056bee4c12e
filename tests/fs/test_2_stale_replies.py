# SPDX-License-Identifier: Apache-2.0
"""Replies that were overtaken: by other clients' changes, a restart of the server, a lost connection."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from millpond.fs.coherence.coherent_fs import CoherentFs
from millpond.fs.vfs.inode_api import CacheMode, NegativeEntry, page_writeback
from millpond.fs.vfs.path_api import Handle

from ..waiting import eventually
from .caching_client import Client, Device
from .recall_clients import client, device, lease, server
from .support import Cutting, Doing, Server, errno_of

__all__ = ["client", "device", "lease", "server"]
PART = 128 << 10


def is_there(client: Client, name: bytes) -> bool:
    try:
        client.find(name)
    except NegativeEntry:
        return False
    return True


def test_what_the_device_makes_before_the_host_hears_that_the_name_is_free(
    client: Client, device: Device, server: Server
) -> None:
    client.find(b"f")
    server.tree.once("getattr", lambda: device.does(b"f", b"another").result())
    Doing(client.tree.unlink, client.public, b"f").result()
    assert client.names() == {"f", "g"} and is_there(client, b"f")


def test_what_the_device_removes_before_the_host_hears_that_it_was_made(
    client: Client, device: Device, server: Server
) -> None:
    server.tree.once("getattr", lambda: Doing(device.tree.unlink, device.public, b"n").result())
    Doing(client.tree.create, client.public, b"n", os.O_RDWR, 0o644, None).result()
    assert client.names() == {"f", "g"} and not is_there(client, b"n")


def test_what_was_read_ahead_from_an_earlier_server(client: Client, device: Device, server: Server) -> None:
    device.put(b"f", bytes(8 * PART))
    node = client.find(b"f")
    for number in range(40):
        is_there(client, b"absent%d" % number)  # so that its grants have higher numbers
    handle = client.tree.open(node, os.O_RDONLY)
    assert client.tree.cache_mode(handle) is CacheMode.CACHED
    assert bytes(client.tree.read(handle, PART, 0)) == bytes(PART)
    server.refusing = True
    server.restart()
    Device(server).put(b"f", b"b" * 8 * PART)
    server.refusing = False
    client.await_lease()
    eventually(lambda: client.kept(node), "the file may be kept")
    assert bytes(client.tree.read(handle, PART, PART)) == b"b" * PART
    Device(server).put(b"f", b"zz")
    assert client.size(client.find(b"f")) == 2


def test_a_write_of_a_client_that_is_ended_meanwhile(client: Client, server: Server) -> None:
    handle = client.tree.open(client.find(b"f"), os.O_RDWR)
    server.tree.once("getattr", server.sessions.close)  # for the reply
    errno_of(client.tree.write, handle, b"x", 0)
    assert not server.tree.before
    assert bytes(client.tree.read(handle, 3, 0)) == b"xne"  # it is opened again


def test_what_was_closed_is_closed_before_long(client: Client, device: Device, server: Server) -> None:
    for number in range(100):
        device.put(b"m%d" % number, b"")
    before_that = server.open_files
    nodes = [client.find(b"m%d" % number) for number in range(100)]
    handles = [client.tree.open(node, os.O_RDWR) for node in nodes]
    assert server.open_files == before_that + 100
    for handle in handles:
        client.tree.release(handle)
    eventually(
        lambda: server.open_files == before_that, "the server has closed the files"
    )  # by who keeps up the lease


def test_what_was_said_to_be_closed_is_not_said_again(client: Client, device: Device) -> None:
    """The reply that would tell that it was heard is lost; by now the file is open again."""
    node = client.find(b"f")
    client.tree.release(_recalled_while_open(client, device, b"two"))
    Cutting.cut_after = "fs.statfs"
    client.tree.statfs()
    assert Cutting.cut_after is None
    Doing(client.find, b"f").result()
    handle = _recalled_while_open(client, device, b"three")
    client.tree.statfs()
    assert not device.written_by_kernel(b"f")
    client.tree.release(handle)
    assert client.read(node) == b"three"


def _recalled_while_open(client: Client, device: Device, data: bytes) -> Handle:
    """The handle of the file, opened without a word, and named when the device wrote it."""
    handle = client.tree.open(client.find(b"f"), os.O_RDONLY)
    Doing(device.put, b"f", data).result()
    eventually(lambda: not device.written_by_kernel(b"f"), "the server was told that the file is open")
    return handle


def test_dirty_pages_that_become_late_just_before_they_are_written(
    client: Client, device: Device, server: Server, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    f = client.find(b"f")
    client.read(f)
    known, original = server.sessions.find(client.tree.session.client), CoherentFs.write
    assert known

    def after_the_device(*arguments: object, **more: object) -> int:
        monkeypatch.setattr(CoherentFs, "write", original)
        device.does(b"f", b"the device's").result()
        return original(*arguments, **more)  # type: ignore[arg-type]

    def write_back() -> None:
        page_writeback.set(True)
        client.tree.write(handle, b"late", 0)

    with client.opened(f, os.O_RDWR) as handle:
        server.sessions.delegations.expire(known.holder)
        monkeypatch.setattr(CoherentFs, "write", after_the_device)
        assert errno_of(Doing(write_back).result) == errno.EIO
    assert (top / "public" / "f").read_bytes() == b"the device's"
