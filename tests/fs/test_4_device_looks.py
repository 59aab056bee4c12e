# SPDX-License-Identifier: Apache-2.0
"""Real mounts: what the device's mount shows is what hosts have made of it."""

from __future__ import annotations

import os
import resource
import time

import pytest

from millpond.fs.store.layout import prepare

from ..effort import scaled
from .conftest import InNamespace, World
from .support import errno_of
from .test_4_coherence import WithBoth


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
        flash, few = world.backing / "public" / "d", max(map(int, os.listdir("/proc/self/fd"))) + 140  # noqa: PTH208
        flash.mkdir()
        for number in range(5 * few):
            (flash / str(number)).touch()
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
        world.mount_device()
        if "kernel itself" not in world.how:
            pytest.skip("a mount without passthrough holds no descriptors of files that are not open")
        top = world.device / "public" / "d"
        assert [errno_of(os.stat, top / str(number)) for number in range(5 * few)] == [None] * (5 * few)

    in_namespace(body)
