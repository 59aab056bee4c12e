# SPDX-License-Identifier: Apache-2.0
"""Real mounts: the device's kernel caches names and attributes until a host changes them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.fs.store.layout import prepare

from ..effort import scaled
from ..waiting import eventually
from .conftest import InNamespace, World
from .support import errno_of
from .test_4_coherence import WithBoth


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def needs_cache(world: World) -> None:
    if "kernel itself" not in world.how:
        pytest.skip("the device's mount caches nothing without passthrough")


def is_cached(world: World, path: Path) -> bool:
    """Whether the kernel answers while the mount's process stands still."""
    path.stat()
    with stopped(world.device_pid):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(OSError):
                os.stat(path)  # noqa: PTH116
            os._exit(0)
        time.sleep(0.2)
        answered, _ = os.waitpid(child, os.WNOHANG)
    if not answered:
        os.waitpid(child, 0)
    return bool(answered)


def test_the_kernel_answers_by_itself(world: World, with_both: WithBoth) -> None:
    def body() -> None:
        needs_cache(world)
        device, host = world.device / "public", world.host / "public"
        (host / "d").mkdir()
        (host / "d" / "f").write_bytes(b"data")
        eventually(lambda: is_cached(world, device / "d" / "f"), "the kernel has it", seconds=10)
        (host / "d" / "f").chmod(0o600)
        assert (device / "d" / "f").stat().st_mode & 0o777 == 0o600

    with_both(body)


def test_a_host_does_not_wait_for_a_mount_that_stands_still(world: World, with_both: WithBoth) -> None:
    world.lease, world.timeout = 3.0, 100.0

    def body() -> None:
        needs_cache(world)
        device, host = world.device / "public", world.host / "public"
        (host / "f").write_bytes(b"old")
        (host / "g").write_bytes(b"old")
        eventually(lambda: is_cached(world, device / "f"), "the kernel has it", seconds=10)
        began = time.monotonic()
        with stopped(world.device_pid):
            (host / "f").write_bytes(b"longer")
            (host / "g").unlink()
            took = time.monotonic() - began
        assert took < 30  # two changes wait for a lease each, on a machine that does other things
        assert (device / "f").stat().st_size == 6
        assert errno_of(os.stat, device / "g") is not None

    with_both(body)


def test_another_server_leaves_nothing_old(world: World, with_both: WithBoth) -> None:
    world.lease = 2.0

    def body() -> None:
        device, host = world.device / "public", world.host / "public"
        (host / "f").write_bytes(b"old")
        for size in range(10, 13):
            (device / "f").stat()
            errno_of(os.stat, device / f"new{size}")
            world.kill(world.server_pid)
            world.start_server()
            (host / "f").write_bytes(bytes(size))
            (host / f"new{size}").touch()
            assert (device / "f").stat().st_size == size
            assert (device / f"new{size}").exists()

    with_both(body)


def test_both_sides_in_turn(world: World, with_both: WithBoth) -> None:
    """Names that come and go, sizes, and what a name stands for: each change is seen by the next look."""

    def body() -> None:
        os.umask(0)
        device, host = world.device / "public", world.host / "public"
        (host / "d").mkdir()
        end, turn = time.monotonic() + scaled(2, 8), 0
        while time.monotonic() < end or turn <= 3:  # also where a turn takes long
            turn += 1
            here, there = (device, host) if turn % 3 == 0 else (host, device)
            (here / "d" / "f").write_bytes(bytes(turn % 100))
            assert (there / "d" / "f").stat().st_size == turn % 100
            assert not (there / "d" / "g").exists()
            (here / "d" / "f").rename(here / "d" / "g")
            assert (there / "d" / "g").exists() and not (there / "d" / "f").exists()
            (here / "d").rename(here / "e")
            assert (there / "e" / "g").stat().st_size == turn % 100 and not (there / "d").exists()
            (here / "e" / "g").unlink()
            assert not (there / "e" / "g").exists() and list((there / "e").iterdir()) == []
            (here / "e").rename(here / "d")
            assert (there / "d").is_dir()

    with_both(body)


def test_more_files_are_walked_over_than_there_are_descriptors(
    world: World, in_namespace: InNamespace
) -> None:
    """Before: each time that the descriptors had run out, one look at a file failed with EMFILE."""

    def body() -> None:
        prepare(world.backing)
        world.start_server()
        flash, few = world.backing / "public" / "d", 150
        flash.mkdir()
        for number in range(5 * few):
            (flash / str(number)).touch()
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
        world.mount_device()
        needs_cache(world)
        top = world.device / "public" / "d"
        eventually(lambda: is_cached(world, top), "the kernel has the directory", seconds=10)
        assert [errno_of(os.stat, top / str(number)) for number in range(5 * few)] == [None] * (5 * few)

    in_namespace(body)
