# SPDX-License-Identifier: Apache-2.0
"""Several programs at once on one mount, each with a model of what it does, and files that all use."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ..effort import scaled
from .conftest import WithBoth, mounted, stats
from .support import Doing, errno_of
from .world import World

_THREADS = 8


@mounted()
def test_files_read_in_order_at_once(world: World) -> None:
    """Data that was read ahead for one is not overwritten by that of another before the kernel has it."""
    size = scaled(quick=6, full=30) << 20
    data = [os.urandom(1 << 16) * (size >> 16) for _ in range(_THREADS)]
    for number, each in enumerate(data):
        (world.device / "public" / str(number)).write_bytes(each)

    def read(number: int) -> None:
        assert (world.host / "public" / str(number)).read_bytes() == data[number]

    for each in [Doing(read, number) for number in range(_THREADS)]:
        each.result(90)


@pytest.mark.serial
@pytest.mark.parametrize("timeout", [pytest.param(3.0, marks=pytest.mark.full), 1000.0])
def test_all_end_soon_after_the_device_has_stopped(
    world: World, with_both: WithBoth, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, and however long an operation may take while the device answers."""
    monkeypatch.setattr("millpond.fs.client.session.SILENT_SECONDS", 3.0)
    world.timeout = timeout

    def body() -> None:
        (world.device / "public" / "d").mkdir()
        os.kill(world.server_pid, signal.SIGSTOP)
        os.waitid(os.P_PID, world.server_pid, os.WSTOPPED | os.WNOWAIT)
        begun = time.monotonic()
        looking = [
            Doing(errno_of, os.stat, world.host / "public" / "d" / str(number)) for number in range(20)
        ]
        assert {each.result(80) for each in looking} == {110}  # ETIMEDOUT
        assert time.monotonic() - begun < 4.0 + 2.0
        mount = stats(world)
        assert sum(of.get("ETIMEDOUT", 0) for of in mount.errors.values()) == 20
        assert sum(sum(took) for took in mount.operations.values()) >= 20
        os.kill(world.server_pid, signal.SIGCONT)
        assert errno_of(os.stat, world.host / "public" / "d" / "0") == 2

    with_both(body)
