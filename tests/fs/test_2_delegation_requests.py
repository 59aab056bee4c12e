# SPDX-License-Identifier: Apache-2.0
"""Requests for exclusive directory delegations: one grant at a time, and the refusals."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.fs.client import async_create as edge
from millpond.fs.client import dir_delegations
from millpond.fs.proto import async_create as n
from millpond.fs.proto import file_ops as p
from millpond.fs.server.preallocation import PreallocatedFiles
from millpond.fs.vfs.inode_api import Node, SetAttr, WouldBlock
from millpond.fs.vfs.path_api import Handle
from millpond.linux import syscalls

from .caching_client import Client, shared
from .support import SOON, Doing, Server, errno_of, lasts
from .test_2_hostile_client import World, world

__all__ = ["world"]
LEASE = 12.0  # so long that nothing ends by it
FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(edge, "_TICK_SECONDS", 1000.0)  # nothing is told by the clock
    with shared(tmp_path, LEASE) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    made = Client(server)
    yield made
    with contextlib.suppress(OSError):
        made.close()


def make(client: Client, name: bytes, parent: Node | None = None) -> tuple[Node, Handle]:
    found, handle = client.tree.create(parent or client.public, name, FLAGS, 0o640, None)
    return found.node, handle


def test_two_threads_get_a_directory_by_one_grant(client: Client, server: Server, tmp_path: Path) -> None:
    make(client, b"first")
    client.gate.shut("fs.prepared")
    one = Doing(make, client, b"one")
    client.gate.reached()
    other = Doing(make, client, b"two")
    assert lasts(lambda: not (one.done or other.done))
    client.gate.open()
    one.result()
    other.result()
    for number in range(20):
        client.tree.release(make(client, b"%d" % number)[1])
    client.tree.fsync(client.tree.opendir(client.public), False)
    assert len(list((tmp_path / "public").iterdir())) == 23
    assert sum(client.tree.rpc.meter.kinds["fs.prepare"]) < 6


def test_who_may_not_wait_does_not_wait_for_who_asks(client: Client) -> None:
    make(client, b"first")
    client.gate.shut("fs.prepared")
    one = Doing(make, client, b"one")
    client.gate.reached()
    with pytest.raises(WouldBlock):
        Doing(make, client, b"two", may_wait=False).result()
    client.gate.open()
    one.result()


def test_what_comes_for_a_directory_that_was_let_go_is_given_back(client: Client, server: Server) -> None:
    for name in (b"first", b"second"):
        make(client, name)
    held = client.tree.async_create.names.held[client.public]
    while held.preallocated:
        make(client, b"%d" % len(held.preallocated))
    client.gate.shut("fs.prepared")
    one = Doing(make, client, b"one")
    client.gate.reached()
    client.tree.async_create.end_if_flushed(client.tree.rpc.inodes.file(client.public))
    client.gate.open()
    one.result()
    client.tree.statfs()
    open_here = len(client.tree.files._open) + sum(
        len(held.preallocated) for held in client.tree.async_create.names.held.values()
    )
    assert server.open_files == open_here


def test_a_second_grant_gives_back_what_the_first_has_prepared(world: World) -> None:
    world.attend()
    before = world.server.open_files
    first = world.say(n.Preallocate(world.directory, 0, 9))
    assert isinstance(first, n.Preallocated) and world.server.open_files == before + 9
    second = world.say(n.Preallocate(world.directory, 0, 3))
    assert isinstance(second, n.Preallocated) and world.server.open_files == before + 3
    for got, answer in ((first, p.Error), (second, n.NamesFlushed)):
        naming = n.NameUpdate(1, world.directory, second.granted, got.nodes[0], b"new", 0o644, 5)
        assert isinstance(world.say(n.FlushNames((naming,))), answer)


@pytest.mark.parametrize("kind", ["casefold", "ecryptfs"])
def test_where_one_name_can_be_written_in_several_ways_nothing_is_made_behind(
    client: Client, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "casefold":
        flags = (0x40000000 | 0x80000).to_bytes(8, sys.byteorder)
        monkeypatch.setattr(fcntl, "ioctl", lambda _file, number, _bytes: flags * (number == 0x80086601))
    else:
        monkeypatch.setattr(syscalls, "file_system", lambda _file: 0xF15F)
    for number in range(5):
        make(client, b"%d" % number)
        assert (tmp_path / "public" / f"{number}").exists()
    assert not client.tree.async_create.names.held


def hold(client: Client, parent: Node) -> None:
    for name in (b"first", b"second"):
        client.tree.release(make(client, name, parent)[1])
    assert client.tree.async_create.delegations.of(client.tree.rpc.inodes.file(parent))
    client.tree.async_create.flush()


def test_who_tells_names_waits_for_nobody(client: Client, server: Server, tmp_path: Path) -> None:
    """Who waits for others while they wait for his names would do so until the time is up."""
    above = client.tree.mkdir(client.public, b"above", 0o755, None).node
    below = client.tree.mkdir(above, b"below", 0o755, None).node
    hold(client, below)
    for number in range(60):
        (tmp_path / "public" / f"{number}").touch()
    server.tree.max_descriptors = 30
    for number in range(60):  # more than there are descriptors: the server forgets what it can
        client.find(b"%d" % number)
    server.tree.max_descriptors = 1000
    with contextlib.closing(Client(server)) as other:
        there = other.find(b"above")
        hold(other, there)
        other.gate.shut("fs.recall")
        make(client, b"f", below)
        client.tree.rpc.inodes.file(below).verifier = 0  # as if another request had not found it there
        told = Doing(client.tree.async_create.flush)
        told.result()  # the other is still being asked for what it has
        assert (tmp_path / "public/above/below/f").exists()
        assert other.tree.async_create.delegations.of(other.tree.rpc.inodes.file(there))
        other.gate.open()


def test_a_directory_that_the_server_has_forgotten_while_no_files_were_prepared(
    client: Client, server: Server, tmp_path: Path
) -> None:
    directory = client.tree.mkdir(client.public, b"d", 0o755, None).node
    hold(client, directory)
    held = client.tree.async_create.names.held[directory]
    while held.preallocated:
        client.tree.release(make(client, b"%d" % len(held.preallocated), directory)[1])
    client.tree.async_create.flush()
    for number in range(60):
        (tmp_path / "public" / f"{number}").touch()
    server.tree.max_descriptors = 20
    for number in range(60):
        client.find(b"%d" % number)
    server.tree.max_descriptors = 1000
    make(client, b"f", directory)
    assert client.tree.async_create.names.held[directory] is held and held.pending
    client.tree.fsync(client.tree.opendir(directory), False)
    assert (tmp_path / "public/d/f").exists()


@pytest.mark.serial
@pytest.mark.parametrize("how", ["settle", "setattr", "create", "write"])
def test_who_has_waited_for_others_to_tell_names_has_less_time_left(
    server: Server, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, go_on = Client(server, timeout=1.0), threading.Event()
    hold(client, client.public)
    monkeypatch.setattr(dir_delegations, "_MOST_PENDING", 0)
    tree = client.tree
    opened = tree.open(make(client, b"f")[0], os.O_RDWR)
    make(client, b"g")
    while how == "create" and tree.async_create.names.held[client.public].preallocated:
        make(client, b"%d" % len(tree.async_create.names.held[client.public].preallocated))
    tell = PreallocatedFiles.flush

    def late(*arguments: Any) -> list[Node]:
        go_on.wait(4 * SOON)
        return tell(*arguments)

    monkeypatch.setattr(PreallocatedFiles, "flush", late)
    with tree.async_create._flushing:
        operations: dict[str, Callable[[], object]] = {
            "settle": tree.async_create.flush,
            "setattr": lambda: tree.setattr(client.public, SetAttr(mode=0o777)),
            "create": lambda: make(client, b"h"),
            "write": lambda: tree.write(opened, b"data", 0),
        }
        start = time.monotonic()
        doing = Doing(operations[how])
        time.sleep(0.8)
    assert errno_of(doing.result) == errno.ETIMEDOUT
    assert time.monotonic() - start < 1.7  # it would take 1.8 s from a second deadline
    go_on.set()
    tree.async_create.flush()
    client.close()


def test_more_files_are_preallocated_without_a_flush_of_the_names(client: Client, tmp_path: Path) -> None:
    hold(client, client.public)
    client.tree.async_create.flush()
    for number in range(40):
        client.tree.release(make(client, b"f%d" % number)[1])
    assert len(client.tree.async_create.names.pending) == 40 and not (tmp_path / "public/f0").exists()


def test_the_names_that_the_server_lacks_have_a_bound(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dir_delegations, "_MOST_PENDING", 30)
    hold(client, client.public)
    client.tree.async_create.flush()
    for number in range(200):
        client.tree.release(make(client, b"f%d" % number)[1])
    assert len(client.tree.async_create.names.pending) <= 30 + 128 and (tmp_path / "public/f0").exists()
