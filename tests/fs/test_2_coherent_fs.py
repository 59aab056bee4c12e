# SPDX-License-Identifier: Apache-2.0
"""The device's own tree with delegations: the recalls of each operation, and write access to files."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.fs.coherence.device_client import DeviceDelegationBreaker
from millpond.fs.coherence.device_fs import DeviceFs
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.mmap_writers import NOT_TOLD, has_writers
from millpond.fs.vfs.inode_api import ROOT, CacheMode, Node, SetAttr
from millpond.fs.vfs.kernel_memory import KernelMemory
from millpond.linux import syscalls

from ..waiting import eventually
from .caching_client import Listening
from .support import Doing
from .test_2_device_delegations import guard, path, server

__all__ = ["guard", "path", "server"]


class OnDevice:
    """The device's tree, guarded, and a client of the manager that wants to keep all that there is."""

    def __init__(self, server: Listening, guard: DeviceDelegationBreaker, top: Path) -> None:
        self.top, self.manager, self.client = top, server.manager, server.client()
        (top / "public").mkdir()
        self.root = os.open(top, os.O_PATH | os.O_DIRECTORY)
        self.inodes = BackingFs(self.root, public=b"public")
        self.tree = DeviceFs(self.inodes, guard, KernelMemory(sys.maxsize, lambda: 0, list))
        self.public = self.tree.lookup(ROOT, b"public").node

    def made(self, name: bytes, parent: Node | None = None) -> Node:
        found, handle = self.tree.create(parent or self.public, name, os.O_RDWR, 0o644, None)
        self.tree.release(handle)
        return found.node

    def keep(self, *nodes: Node) -> None:
        inodes = [self.inodes.inode(node) for node in nodes]
        eventually(
            lambda: all(self.manager.grant_read(self.client, inode) for inode in inodes),
            "the client keeps the files",
        )

    def given_up(self, doing: Doing) -> set[int]:
        """All that was recalled until the operation was done."""
        found: set[int] = set()
        while not doing.done:
            inodes, upto = self.manager.next_recall(self.client, 0.05)
            self.manager.return_delegations(self.client, inodes, upto, ())
            found |= set(inodes)
        doing.result()
        return found


@pytest.fixture
def device(server: Listening, guard: DeviceDelegationBreaker, top: Path) -> Iterator[OnDevice]:
    made = OnDevice(server, guard, top)
    yield made
    made.inodes.close()
    os.close(made.root)


def test_a_writer_of_a_file(device: OnDevice) -> None:
    tree, manager = device.tree, device.manager
    f = device.made(b"f")
    inode = device.inodes.inode(f)
    reading = tree.open(f, os.O_RDONLY)
    assert tree.cache_mode(reading) is CacheMode.PASSTHROUGH
    device.keep(f)
    doing = Doing(tree.open, f, os.O_RDWR)
    device.given_up(doing)
    writing = doing.result()
    assert tree.cache_mode(writing) is CacheMode.PASSTHROUGH
    assert manager.grant_read(device.client, inode) == 0 and not manager.opened(device.client, inode)
    tree.release(writing)
    device.keep(f)
    assert manager.opened(device.client, inode)
    tree.release(reading)
    doing = Doing(tree.open, f, os.O_WRONLY)
    assert device.given_up(doing) == {inode}
    assert tree.cache_mode(doing.result()) is CacheMode.DIRECT
    device.keep(f)
    writing = Doing(tree.write, doing.result(), b"seen", 0)
    assert device.given_up(writing) == {inode}
    tree.release(doing.result())


def test_a_reader_of_a_file_that_the_daemon_writes(device: OnDevice) -> None:
    """All who have it open have it so in the same way."""
    tree, manager = device.tree, device.manager
    f = device.made(b"f")
    inode = device.inodes.inode(f)
    eventually(lambda: manager.opened(device.client, inode), "the client may open the file")
    handles = [tree.open(f, flags) for flags in (os.O_WRONLY, os.O_RDONLY, os.O_RDWR)]
    assert [tree.cache_mode(handle) for handle in handles] == [CacheMode.DIRECT] * 3
    manager.closed(device.client, inode)
    handles.append(tree.open(f, os.O_RDWR))
    tree.release(handles.pop(0))
    assert [tree.cache_mode(handle) for handle in handles] == [CacheMode.DIRECT] * 3
    for handle in handles:
        tree.release(handle)
    handle = tree.open(f, os.O_RDWR)
    assert tree.cache_mode(handle) is CacheMode.PASSTHROUGH
    tree.release(handle)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.expected_log(re.escape(NOT_TOLD))
def test_a_file_of_which_the_kernel_does_not_say_who_maps_it_stays_written(
    device: OnDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user's, to a process without CAP_LEASE. Nothing is kept open for it, and one line says so."""
    tree, manager = device.tree, device.manager
    f, g = device.made(b"f"), device.made(b"g")
    for name in ("f", "g"):
        os.chown(device.top / "public" / name, 1, 1)
    with syscalls.without_capability(syscalls.CAP_LEASE), caplog.at_level(logging.WARNING):
        gc.collect()  # what earlier tests have left closes descriptors at some time
        before = open_descriptors()
        for node in (f, f, g):
            tree.release(tree.open(node, os.O_RDWR))
        assert open_descriptors() == before
    assert [manager.grant_read(device.client, device.inodes.inode(node)) for node in (f, g)] == [0, 0]
    assert manager.device[1] == 2
    assert [record.getMessage() for record in caplog.records] == [NOT_TOLD]


def test_an_open_of_a_file_during_a_lookup(device: OnDevice) -> None:
    """Nobody hears of the lease by which that is done, and nobody is killed by its signal."""
    f = device.made(b"f")
    with (device.top / "public/f").open("rb") as looked_at:
        fcntl.fcntl(looked_at, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(looked_at, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        doing = [Doing(device.tree.open, f, os.O_RDWR), Doing(device.tree.setattr, f, SetAttr(size=3))]
        time.sleep(0.05)
        assert not any(one.done for one in doing)
        fcntl.fcntl(looked_at, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        handle, known = [one.result() for one in doing]
        assert known.attributes.size == 3 and has_writers(looked_at.fileno())
        device.tree.release(handle)
        eventually(lambda: not has_writers(looked_at.fileno()), "the file is written no more")
