# SPDX-License-Identifier: Apache-2.0
"""A mount's requests overlap, within bounds, and end when their programs are interrupted."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millpond.fs.client import readahead
from millpond.fs.fuse import threads
from millpond.fs.fuse.device import FuseDevice
from millpond.fs.fuse.server import FuseServer
from millpond.fs.server import sessions
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.layout import prepare
from millpond.fs.vfs.inode_api import CachedAttributes, CacheMode, Node
from millpond.fs.vfs.operation import about_to_wait, current
from millpond.fs.vfs.path_api import Handle, os_error

from ..waiting import eventually
from .conftest import in_own_mounts
from .support import SOON, Doing, errno_of
from .world import World

LONG = 60.0
_BACKGROUND = 4  # threads: recalls, fetching, file locks, interrupts


class Waits(BackingFs):
    """A flash at which whoever asks for the attributes of a file of ``slow`` waits until ``go``, unless
    ``says`` without saying so.
    """

    def __init__(self, root: int) -> None:
        super().__init__(root)
        self.slow: set[Node] = set()
        self.says, self.asked = True, 0
        self.go, self.waiting = threading.Event(), 0
        self._count = threading.Lock()

    def getattr(self, node: Node) -> CachedAttributes:
        self.asked += 1
        if node in self.slow and not self.go.is_set():
            self._wait()
        return super().getattr(node)

    def fsync(self, handle: Handle, data_only: bool) -> None:
        if not self.go.is_set():
            self._wait()
        super().fsync(handle, data_only)

    def _wait(self) -> None:
        with self._count:
            self.waiting += 1
        if self.says:
            about_to_wait()
        operation, woken = current.get(), threading.Event()
        assert operation
        operation.add_wake(woken.set)
        try:
            while not self.go.wait(0.01):
                if woken.is_set():
                    raise os_error(errno.EINTR)
        finally:
            operation.remove_wake(woken.set)
            with self._count:
                self.waiting -= 1

    def cache_mode(self, _handle: Handle) -> CacheMode:
        return CacheMode.DIRECT


@contextmanager
def served(world: World, kind: type[Waits] = Waits) -> Iterator[tuple[Waits, Path]]:
    """A mount of such a flash, served by this process: no operation of this thread may wait for it."""
    prepare(world.backing)
    tree = kind(os.open(world.backing / "public", os.O_PATH))
    kernel = FuseDevice(world.device, "csd0", os.open(world.backing, os.O_PATH))
    binding = FuseServer(kernel, tree)
    serving = Doing(binding.serve)
    try:
        yield tree, world.device
    finally:  # a process that waits for itself could not even be killed
        tree.go.set()
        has_ended = binding.close()
        kernel.unmount()
    assert has_ended
    serving.result()
    kernel.close()


def make_slow(tree: Waits, top: Path, names: int) -> list[Path]:
    """Files whose attributes are waited for."""
    paths = [top / str(number) for number in range(names)]
    for path in paths:
        path.touch()
    tree.slow = {tree.lookup(Node(1), path.name.encode()).node for path in paths}
    return paths


@in_own_mounts
def test_more_than_the_bound_wait_their_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MOST_AT_ONCE", 3)
    with served(world) as (tree, top):
        looking = [Doing(os.stat, path) for path in make_slow(tree, top, 20)]
        eventually(lambda: tree.waiting == 3, "as many wait as there may be")
        tree.go.set()
        for each in looking:
            each.result()


@in_own_mounts
def test_a_read_does_not_wait_for_its_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recall waits for its pages, and the others might wait for the recall."""
    monkeypatch.setattr(threads, "MOST_AT_ONCE", 2)
    with served(world) as (tree, top):
        slow = make_slow(tree, top, 5)
        (top / "f").write_bytes(b"data")
        file = os.open(top / "f", os.O_RDONLY)
        looking = [Doing(os.stat, path) for path in slow]
        eventually(lambda: tree.waiting == 2, "as many wait as there may be")
        try:
            for _ in range(2):
                assert Doing(os.pread, file, 4, 0).result(SOON) == b"data"
            assert tree.waiting == 2  # a read that has ended makes room for no other request
        finally:  # a close waits for its turn, too
            tree.go.set()
            os.close(file)
        for each in looking:
            each.result()


@in_own_mounts
def test_a_wait_of_which_nothing_is_said_holds_up_nobody(world: World) -> None:
    with served(world) as (tree, top):
        tree.says = False
        looking = [Doing(os.stat, path) for path in make_slow(tree, top, 5)]
        (top / "quick").touch()
        eventually(lambda: tree.waiting == 5, "all wait at once")
        assert (top / "quick").stat().st_size == 0
        tree.go.set()
        for each in looking:
            each.result()


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGKILL])
@in_own_mounts
def test_a_signal_ends_a_wait(world: World, number: signal.Signals) -> None:
    with served(world) as (tree, top):
        (path, other) = make_slow(tree, top, 2)
        program = subprocess.Popen(["stat", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        looking = Doing(os.stat, other)
        eventually(lambda: tree.waiting == 2, "both wait")
        program.send_signal(number)
        assert program.wait(LONG) == -number
        eventually(lambda: tree.waiting == 1, "the other still waits")
        assert not looking.done
        tree.go.set()
        looking.result()


@in_own_mounts
def test_a_signal_ends_the_wait_for_a_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MOST_AT_ONCE", 1)
    with served(world) as (tree, top):
        (path, other) = make_slow(tree, top, 2)
        looking = Doing(os.stat, other)
        eventually(lambda: tree.waiting == 1, "one waits")
        program = subprocess.Popen(["stat", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wchan = Path(f"/proc/{program.pid}/syscall")
        eventually(lambda: "running" not in wchan.read_text(), "the program waits")
        program.send_signal(signal.SIGKILL)
        assert program.wait(LONG) == -signal.SIGKILL
        tree.go.set()
        looking.result()


@in_own_mounts
def test_a_signal_just_before_the_reply_is_no_error(world: World) -> None:
    """As on a local file system, where no operation fails by a signal."""
    with served(world) as (tree, top):
        (path,) = make_slow(tree, top, 1)
        caught = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: caught.set())

        def disturb() -> None:
            eventually(lambda: tree.waiting == 1, "it waits")
            os.kill(os.getpid(), signal.SIGUSR1)
            tree.go.set()

        helper = Doing(disturb)
        assert path.stat().st_size == 0
        helper.result()
        eventually(caught.is_set, "the signal came")


@in_own_mounts
def test_a_mount_ends_under_load(world: World) -> None:
    over = threading.Event()
    with served(world) as (tree, top):
        (path,) = make_slow(tree, top, 1)
        tree.slow.clear()
        file = os.open(path, os.O_RDONLY)

        def load() -> None:
            while not over.is_set() and errno_of(os.fstat, file) is None:
                pass

        loading = [Doing(load) for _ in range(3)]
        eventually(lambda: tree.asked > 100, "there is load")
    over.set()
    for each in loading:
        each.result()
    errno_of(os.close, file)  # the mount has gone


def test_the_server_has_a_slot_for_all_that_wait() -> None:
    """A client's requests and threads; readahead and keep-alives."""
    assert threads.MOST_AT_ONCE + threads.MORE_READS + _BACKGROUND <= sessions._MAX_SLOTS
    assert readahead._LANES + 1 <= sessions._SPARE_SLOTS


class TooMuch(Waits):
    """A file system that returns more than it was asked for."""

    def read(self, handle: Handle, size: int, offset: int) -> bytes:
        return bytes(size + 1)


@in_own_mounts
def test_a_reply_that_the_kernel_refuses_does_not_end_the_mount(world: World) -> None:
    with served(world, TooMuch) as (_tree, top):
        (top / "f").write_bytes(b"x" * 100)
        with (top / "f").open("rb", buffering=0) as file:
            assert errno_of(os.pread, file.fileno(), 10, 0) in (errno.EINVAL, errno.EIO)
        assert (top / "f").stat().st_size == 100
