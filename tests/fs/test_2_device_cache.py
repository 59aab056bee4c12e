# SPDX-License-Identifier: Apache-2.0
"""What the kernel of the device's mount may cache, between the mount and the delegation manager."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.fs.coherence import device_server
from millpond.fs.coherence.delegation_table import DEVICE
from millpond.fs.coherence.device_cache import DeviceCache
from millpond.fs.coherence.lease_file import LEASE_SECONDS
from millpond.fs.coherence.shared_bitmap import CACHE_SLOTS, SharedBitmap, send_bitmap
from millpond.fs.proto import delegations as m
from millpond.fs.vfs.inode_api import Node, WouldBlock
from millpond.fs.vfs.path_api import os_error
from millpond.wire.channel import Channel

from ..effort import scaled
from ..waiting import eventually
from .caching_client import LONG_LEASE, Listening, managed
from .support import SOON, Doing, lasts, listening

D, F, G = 2, 10, 11
OF_D, OF_F, OF_G = Node(102), Node(110), Node(111)


class Kernel:
    """What a kernel is told to drop; it may not know a node yet, or stand still."""

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.names = 0
        self.unknown: set[int] = set()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def drop_names(self) -> None:
        self.names += 1

    def drop(self, node: int, *, data: bool) -> bool:
        assert not data and self.goes_on.wait(SOON)
        if node in self.unknown:
            return False
        self.dropped.append(node)
        return True


class Mounted:
    """The cache of a mount, and its kernel."""

    def __init__(self, path: Path) -> None:
        self.kernel, self.known, self.written = Kernel(), {OF_D, OF_F, OF_G}, set[int]()
        self.cache = DeviceCache(path, self.known.__contains__, self.written.__contains__)
        self.cache.start(self.kernel)

    def look(self, inode: int = F, node: Node = OF_F, *, directory: bool = False) -> float:
        return self.cache.seconds(inode, node, self.cache.begin(), directory=directory)

    def await_lease(self) -> None:
        eventually(lambda: self.cache.begin() >= 0, "the mount has a lease")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that ends notices it when it sends its next recall."""
    monkeypatch.setattr(device_server, "_RECALL_SECONDS", 0.1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def server(path: Path) -> Iterator[Listening]:
    with managed(path) as made:
        yield made


@pytest.fixture
def mount(path: Path) -> Iterator[Mounted]:
    made = Mounted(path)
    yield made
    made.kernel.goes_on.set()
    made.cache.stop()


@pytest.fixture
def both(server: Listening, mount: Mounted) -> tuple[Listening, Mounted]:
    mount.await_lease()
    return server, mount


def change(server: Listening, *directories: int, inodes: tuple[int, ...] = ()) -> None:
    with server.manager.write_intent(server.client(), *directories, inodes=inodes):
        pass


def test_a_change_waits_until_the_kernel_has_dropped_it(both: tuple[Listening, Mounted]) -> None:
    server, mount = both
    assert mount.look() > 0 and mount.look(D, OF_D, directory=True) > 0 and mount.cache.count == 2
    mount.kernel.goes_on.clear()
    changing = Doing(change, server, inodes=(F,))
    assert lasts(lambda: not changing.done)
    mount.kernel.goes_on.set()
    changing.result()
    assert mount.kernel.dropped == [OF_F] and not mount.kernel.names and mount.cache.count == 1
    change(server, D)
    assert mount.kernel.dropped == [OF_F, OF_D] and mount.kernel.names == 1 and not mount.cache.count
    change(server, D, inodes=(F, G))  # which it has no more
    assert len(mount.kernel.dropped) == 2 and mount.kernel.names == 1
    assert mount.look() > 0


def test_nothing_is_cached_during_a_change(both: tuple[Listening, Mounted]) -> None:
    server, mount = both
    since = mount.cache.begin()
    with server.manager.write_intent(server.client(), inodes=(F,)):
        assert not mount.look() and mount.look(G, OF_G) > 0
        assert not mount.cache.seconds(F, OF_F, since, directory=False)
        meanwhile = mount.cache.begin()
    for earlier in (since, meanwhile):  # looked at before the change, or during it
        assert not mount.cache.seconds(F, OF_F, earlier, directory=False)
    assert mount.look() > 0
    with server.manager.write_intent(DEVICE, inodes=(F,)):  # its own, of which its kernel knows
        assert mount.look() > 0


def test_a_file_that_the_kernel_writes_is_not_cached(both: tuple[Listening, Mounted]) -> None:
    _, mount = both
    assert mount.look() > 0
    mount.written.add(F)
    mount.cache.drop_attributes(F)
    assert mount.kernel.dropped == [OF_F] and not mount.look()
    mount.written.clear()
    assert mount.look() > 0


def test_a_change_that_must_not_wait_is_told_so(both: tuple[Listening, Mounted]) -> None:
    server, mount = both
    assert mount.look() > 0
    with pytest.raises(WouldBlock):
        Doing(change, server, inodes=(F,), may_wait=False).result()
    eventually(lambda: mount.kernel.dropped == [OF_F], "it is recalled nevertheless")
    eventually(lambda: mount.look() > 0, "no change is under way")


def begin_recall(server: Listening, mount: Mounted, inode: int) -> None:
    """A recall of an inode that the mount performs, and that no change waits for any more."""
    mount.kernel.goes_on.clear()
    with pytest.raises(WouldBlock):
        Doing(change, server, inodes=(inode,), may_wait=False).result()
    eventually(lambda: not mount.cache.count, "the mount has the recall")


def test_a_second_change_waits_for_the_recall_of_the_first(both: tuple[Listening, Mounted]) -> None:
    """Each request of a host that must not wait is repeated as one that may."""
    server, mount = both
    assert mount.look() > 0
    begin_recall(server, mount, F)
    changing = Doing(change, server, inodes=(F,))
    assert lasts(lambda: not changing.done)
    mount.kernel.goes_on.set()
    changing.result()
    assert mount.kernel.dropped == [OF_F]


def test_what_is_found_during_a_recall_is_recalled_again(both: tuple[Listening, Mounted]) -> None:
    server, mount = both
    assert mount.look() > 0
    begin_recall(server, mount, F)
    assert mount.look() > 0  # nothing is changed just now
    mount.kernel.goes_on.set()
    for _ in range(2):  # the second time there is nothing
        change(server, inodes=(F,))
        assert mount.kernel.dropped == [OF_F, OF_F]


def test_a_reply_under_way_is_waited_for(both: tuple[Listening, Mounted]) -> None:
    """The kernel does not know a node yet whose lookup has just been answered, or has forgotten it."""
    server, mount = both
    mount.kernel.unknown.add(OF_F)
    for then in (mount.kernel.unknown.clear, mount.known.clear):
        assert mount.look() > 0
        changing = Doing(change, server, inodes=(F,))
        time.sleep(0.1)
        assert not changing.done
        then()
        changing.result()
        mount.kernel.unknown.add(OF_F)


def test_a_mount_that_stands_still_delays_a_change_for_its_lease(path: Path) -> None:
    with managed(path) as server:
        server.manager.mount._lease = server.manager.lease = 1.0
        mount = Mounted(path)
        mount.await_lease()
        assert 0 < mount.look() <= 1
        mount.kernel.goes_on.clear()
        began = time.monotonic()
        change(server, inodes=(F,))
        assert time.monotonic() - began < SOON
        assert not mount.look(G, OF_G)  # for that long the kernel keeps nothing
        mount.kernel.goes_on.set()
        eventually(lambda: mount.look() > 0, "it goes on with a new lease")
        change(server, inodes=(F,))
        mount.cache.stop()


def test_another_manager_starts_with_nothing_cached(both: tuple[Listening, Mounted], path: Path) -> None:
    server, mount = both
    assert mount.look() > 0
    server.kill()
    eventually(lambda: mount.kernel.dropped == [OF_F], "what it had is dropped")
    assert not mount.look() and not mount.cache.count
    with managed(path) as other:
        mount.await_lease()
        assert mount.look() > 0
        change(other, inodes=(F,))
        assert mount.kernel.dropped == [OF_F, OF_F]


def test_nothing_is_cached_that_was_looked_at_before_the_manager_had_gone(
    both: tuple[Listening, Mounted],
) -> None:
    server, mount = both
    looking = threading.current_thread()

    def clock() -> float:
        """The manager goes, and all is dropped, once a look has found the mount connected."""
        if threading.current_thread() is looking and mount.cache.begin() >= 0:
            server.kill()
            eventually(lambda: mount.cache.begin() < 0, "the mount sees that the manager has gone")
            eventually(lambda: mount.kernel.dropped, "what it had is dropped")
        return time.monotonic()

    assert mount.look(G, OF_G) > 0
    mount.cache._clock = clock
    assert not mount.look()


def test_the_mount_after_a_mount(both: tuple[Listening, Mounted], path: Path) -> None:
    server, mount = both
    assert mount.look() > 0
    mount.cache.stop()
    change(server, inodes=(F,))
    other = Mounted(path)
    other.await_lease()
    assert other.look() > 0
    change(server, inodes=(F,))
    assert other.kernel.dropped == [OF_F]
    other.cache.stop()


def test_inodes_that_share_a_mark(both: tuple[Listening, Mounted]) -> None:
    server, mount = both
    assert mount.look() > 0
    change(server, inodes=(F + CACHE_SLOTS,))
    assert not mount.kernel.dropped and mount.look() > 0
    assert mount.look(F + CACHE_SLOTS, OF_G) > 0
    mount.cache.forget(F + CACHE_SLOTS, OF_G)
    change(server, inodes=(F,))
    assert mount.kernel.dropped == [OF_F]


def test_nodes_that_are_forgotten(both: tuple[Listening, Mounted]) -> None:
    server, mount = both
    assert mount.look() > 0
    mount.cache.forget(F, OF_G)  # an earlier node of the same file
    assert mount.cache.count == 1
    mount.cache.forget(F, OF_F)
    change(server, inodes=(F,))
    assert not mount.cache.count and not mount.kernel.dropped


def test_what_is_cached_is_what_is_there(both: tuple[Listening, Mounted]) -> None:
    """Threads of the mount look at files that clients change: what the kernel keeps is never older than what
    a change has left.
    """
    server, mount = both
    inodes = range(F, F + 4)
    truth, kept = dict.fromkeys(inodes, 0), dict[int, int]()
    end, wrong = time.monotonic() + scaled(1, 5), []

    def drop(node: int, *, data: bool) -> bool:
        kept.pop(node - 100, None)
        return True

    mount.kernel.drop = drop  # type: ignore[method-assign]

    def look() -> None:
        while time.monotonic() < end:
            inode = random.choice(inodes)
            since = mount.cache.begin()
            found = truth[inode]
            if mount.cache.seconds(inode, Node(inode + 100), since, directory=False):
                kept[inode] = found

    def alter() -> None:
        client = server.client()
        while time.monotonic() < end:
            inode = random.choice(inodes)
            with server.manager.write_intent(client, inodes=(inode,)):
                if inode in kept:
                    wrong.append(inode)
                truth[inode] += 1

    doing = [Doing(look), Doing(alter)]
    for each in doing:
        each.result()
    assert sum(truth.values()) > 10
    assert len(wrong) <= sum(truth.values()) / 10  # this kernel, unlike Linux, keeps replies under way


@pytest.mark.parametrize("size", [0, 4096])
def test_a_manager_with_too_little_memory(path: Path, size: int) -> None:
    """A server that was taken over cannot end the mount."""
    listener = listening(path)
    mount = Mounted(path)
    connection = listener.accept()[0]
    descriptor = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    with Channel(connection, "mount") as channel:
        channel.expect(m.BeginCaching, Deadline.after(SOON))
        channel.send(m.CachingBegun(LONG_LEASE), Deadline.after(SOON))
        socket.send_fds(channel.sock, [b"m"], [descriptor])
        assert channel.sock.recv(1) == b""
    os.close(descriptor)
    assert not mount.look()
    listener.close()
    mount.cache.stop()


@pytest.mark.parametrize("lease", [1e300, math.nan, math.inf])
def test_a_manager_with_a_lease_without_end(path: Path, lease: float) -> None:
    listener = listening(path)
    mount = Mounted(path)
    with Channel(listener.accept()[0], "mount") as channel:
        channel.expect(m.BeginCaching, Deadline.after(SOON))
        channel.send(m.CachingBegun(lease), Deadline.after(SOON))
        send_bitmap(channel.sock, SharedBitmap())
        channel.sock.recv(1)
        channel.send(m.RecallCached(()), Deadline.after(SOON))
        channel.expect(m.CachedDropped, Deadline.after(SOON))
        assert 0 <= mount.look() <= LEASE_SECONDS
    listener.close()
    mount.cache.stop()


def test_a_kernel_that_cannot_drop_names_drops_the_rest(both: tuple[Listening, Mounted]) -> None:
    server, mount = both

    def refuse() -> None:
        raise os_error(errno.EINVAL)

    mount.kernel.drop_names = refuse  # type: ignore[method-assign]
    assert mount.look(D, OF_D, directory=True) > 0
    change(server, D)
    assert mount.kernel.dropped == [OF_D]


def test_a_manager_that_recalls_what_is_not_there(path: Path) -> None:
    listener = listening(path)
    mount = Mounted(path)
    connection, changing = listener.accept()[0], SharedBitmap()
    with Channel(connection, "mount") as channel:
        channel.expect(m.BeginCaching, Deadline.after(SOON))
        channel.send(m.CachingBegun(LONG_LEASE), Deadline.after(SOON))
        send_bitmap(channel.sock, changing)
        _, descriptors, _, _ = socket.recv_fds(channel.sock, 1, 1)
        with pytest.raises(PermissionError):
            os.pwrite(descriptors[0], b"x", 0)
        os.close(descriptors[0])
        for number in range(200):
            recall = m.RecallCached(tuple(range(number, number + 1000)))
            channel.call(recall, m.CachedDropped, Deadline.after(SOON))
        assert mount.look() > 0
        channel.send(m.RecallCached((-1, 1 << 63)), Deadline.after(SOON))
        with contextlib.suppress(Exception):
            channel.expect(m.CachedDropped, Deadline.after(SOON))
    assert not mount.kernel.dropped or mount.kernel.dropped == [OF_F]
    listener.close()
    mount.cache.stop()
