# SPDX-License-Identifier: Apache-2.0
"""Replies that were overtaken: by other clients' changes, a restart of the server, a lost connection."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.fs.coherence.coherent_fs import CoherentFs
from millpond.fs.server.handlers import RequestHandlers
from millpond.fs.vfs.inode_api import CacheMode, NegativeEntry, may_block
from millpond.fs.vfs.path_api import Handle

from ..waiting import eventually
from .caching_client import Client, Device, shared
from .support import Cutting, Doing, Server, errno_of

LEASE = 2.0
PART = 128 << 10


@pytest.fixture
def server(top: Path) -> Iterator[Server]:
    with shared(top, LEASE) as made:
        yield made


@pytest.fixture
def device(server: Server) -> Device:
    made = Device(server)
    made.put(b"f", b"one")
    return made


@pytest.fixture
def client(server: Server, device: Device) -> Iterator[Client]:
    made = Client(server)
    made.await_lease()
    yield made
    made.close()


def is_there(client: Client, name: bytes) -> bool:
    try:
        client.find(name)
    except NegativeEntry:
        return False
    return True


def before(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, does: Callable[[], object]) -> None:
    """Something else is done before the method is next called."""
    original = getattr(kind, method)

    def first(*arguments: object) -> object:
        monkeypatch.setattr(kind, method, original)
        Doing(does).result()
        return original(*arguments)

    monkeypatch.setattr(kind, method, first)


def test_what_the_device_makes_before_the_host_hears_that_the_name_is_free(
    client: Client, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.find(b"f")
    before(monkeypatch, RequestHandlers, "_changed", lambda: device.put(b"f", b"another"))
    Doing(client.tree.unlink, client.public, b"f").result()
    assert client.names() == {"f"} and is_there(client, b"f")


def test_what_the_device_removes_before_the_host_hears_that_it_was_made(
    client: Client, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch, RequestHandlers, "_created_reply", lambda: device.tree.unlink(device.public, b"n"))
    Doing(client.tree.create, client.public, b"n", os.O_RDWR, 0o644, None).result()
    assert client.names() == {"f"} and not is_there(client, b"n")


def test_what_was_read_ahead_from_an_earlier_server(client: Client, device: Device, server: Server) -> None:
    device.put(b"f", bytes(8 * PART))
    node = client.find(b"f")
    for number in range(40):
        is_there(client, b"absent%d" % number)  # so that its grants have higher numbers
    token = may_block.set(False)  # read ahead is for the mount's own thread
    handle = client.tree.open(node, os.O_RDONLY)
    assert client.tree.cache_mode(handle) is CacheMode.CACHED
    assert bytes(client.tree.read(handle, PART, 0)) == bytes(PART)
    may_block.reset(token)
    server.refusing = True
    server.restart()
    Device(server).put(b"f", b"b" * 8 * PART)
    server.refusing = False
    client.await_lease()
    eventually(lambda: client.kept(node), "the file may be kept")
    token = may_block.set(False)
    try:
        assert bytes(client.tree.read(handle, PART, PART)) == b"b" * PART
    finally:
        may_block.reset(token)
    Device(server).put(b"f", b"zz")
    assert client.size(client.find(b"f")) == 2


def test_a_write_of_a_client_that_is_ended_meanwhile(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = client.tree.open(client.find(b"f"), os.O_RDWR)
    original, ended = CoherentFs.write, threading.Event()

    def write(*arguments: object, **more: object) -> int:
        monkeypatch.setattr(CoherentFs, "write", original)
        count: int = original(*arguments, **more)  # type: ignore[arg-type]
        server.sessions.close()
        ended.set()
        return count

    monkeypatch.setattr(CoherentFs, "write", write)
    errno_of(client.tree.write, handle, b"x", 0)
    assert ended.is_set()
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
