# SPDX-License-Identifier: Apache-2.0
"""Real mounts: hosts and servers that die, freeze or restart, and their leases."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from ..effort import scaled
from ..waiting import eventually
from .conftest import mounted
from .support import Doing, errno_of, lasts
from .test_4_coherence import NEW, OLD, PAGE, Looking, can_be_mapped, parts, write_at
from .world import World

LEASE = scaled(quick=1.0, full=2.0)


def warmed(top: Path) -> None:
    """The host's kernel keeps all that there is, once it has heard that the device has closed the file."""
    eventually(lambda: can_be_mapped(top / "f"), "the host may keep the file")
    for _ in range(3):
        assert (top / "f").read_bytes() == OLD
        assert errno_of(os.stat, top / "none") == errno.ENOENT
        assert "none" not in os.listdir(top)  # noqa: PTH208


def changed(top: Path) -> None:
    write_at(top / "f", NEW, 0)
    (top / "f").chmod(0o646)
    (top / "none").touch()


def as_changed(top: Path) -> bool:
    status = (top / "f").stat()
    data = (top / "f").read_bytes()
    assert data in (OLD, NEW)
    return (
        data == NEW
        and stat.S_IMODE(status.st_mode) == 0o646
        and errno_of(os.stat, top / "none") is None
        and "none" in os.listdir(top)  # noqa: PTH208
    )


@mounted(lease=60.0)  # much longer than the changes take on a slow machine
def test_a_host_that_was_killed_is_not_waited_for(world: World) -> None:
    here, there = parts(world)
    (here / "f").write_bytes(OLD)
    warmed(there)
    world.kill(world.host_pid)
    start = time.monotonic()
    changed(here)
    assert time.monotonic() - start < world.lease / 2


@mounted(lease=LEASE)
def test_a_host_that_stands_still_is_waited_for_as_long_as_its_lease(world: World) -> None:
    here, there = parts(world)
    (here / "f").write_bytes(OLD)
    kept = os.open(there / "f", os.O_RDONLY)
    warmed(there)
    os.kill(world.host_pid, signal.SIGSTOP)
    start = time.monotonic()
    changed(here)
    assert time.monotonic() - start < 10 * LEASE
    looking = Doing(as_changed, there), Doing(os.pread, kept, 1 << 20, 0)
    time.sleep(0.5)
    os.kill(world.host_pid, signal.SIGCONT)
    assert [each.result() for each in looking] == [True, NEW]
    assert as_changed(there)
    eventually(lambda: _keeps(there / "f"), "the host's kernel keeps the file again")
    write_at(here / "f", OLD, 0)
    assert (there / "f").read_bytes() == OLD and os.pread(kept, 1 << 20, 0) == OLD


def _keeps(path: Path) -> bool:
    """Whether the kernel goes by what it knows: it asks nobody, so asking costs nothing."""
    start = time.perf_counter()
    for _ in range(100):
        path.stat()
    return time.perf_counter() - start < 0.05


@mounted(lease=LEASE)
def test_what_a_host_that_stood_still_had_not_written_is_not_lost_if_nobody_minds(world: World) -> None:
    """Its lease was over, but only another file was changed meanwhile."""
    os.umask(0)
    here, there = parts(world)
    (there / "g").write_bytes(OLD)
    with (there / "f").open("w+b", buffering=0) as file:
        file.write(OLD)
        with mmap.mmap(file.fileno(), 0) as view:
            view[:4] = b"kept"
            assert (there / "g").read_bytes() == OLD
            os.kill(world.host_pid, signal.SIGSTOP)
            write_at(here / "g", NEW, 0)
            os.kill(world.host_pid, signal.SIGCONT)
            eventually(
                lambda: (here / "f").read_bytes()[:4] == b"kept",
                "what the host stored reaches the device",
            )
            view.flush()
    assert (here / "f").read_bytes() == b"kept" + OLD[4:]


@pytest.mark.parametrize("written", [False, True], ids=["read", "written"])
@mounted(lease=LEASE)
def test_what_was_late_is_told_to_whoever_stored_it(world: World, written: bool) -> None:
    """Also of a file of which the host knows only what it has written itself."""
    os.umask(0)
    here, there = parts(world)
    with (there / "f").open("w+b", buffering=0) as file:
        file.write(OLD)
        if not written:
            assert os.pread(file.fileno(), len(OLD), 0) == OLD
        with mmap.mmap(file.fileno(), 0) as view:
            view[:4] = b"late"
            os.kill(world.host_pid, signal.SIGSTOP)
            write_at(here / "f", NEW, 0)
            os.kill(world.host_pid, signal.SIGCONT)
            eventually(lambda: view[PAGE : PAGE + 4] == b"new ", "the mapping shows what the device wrote")
            assert errno_of(view.flush) == errno.EIO
            view[:4] = b"anew"
            view.flush()
    assert (here / "f").read_bytes() == b"anew" + NEW[4:]


@pytest.mark.parametrize("held", [False, True], ids=["", "held-open-by-the-device"])
@mounted(lease=LEASE)
def test_a_server_that_was_started_again(world: World, held: bool) -> None:
    os.umask(0)
    here, there = parts(world)
    (here / "f").write_bytes(OLD)
    warmed(there)
    file = os.open(here / "f", os.O_RDWR) if held else -1
    world.kill(world.server_pid)
    world.start_server()
    for number in range(round(LEASE / 0.05)):
        if held:
            os.pwrite(file, b"%4d" % number, 0)
        else:
            write_at(here / "f", b"%4d" % number, 0)
        assert (there / "f").read_bytes()[:4] == b"%4d" % number
        time.sleep(0.05)
    changed(here)
    assert as_changed(there)


@mounted(lease=60.0)  # what its kernel keeps must last until it is looked at, on a slow machine, too
def test_a_server_that_was_started_again_waits_for_a_host_that_was_cut_off(world: World) -> None:
    """It goes by what the server before has granted it."""
    here, there = parts(world)
    (here / "f").write_bytes(OLD)
    warmed(there)
    os.kill(world.host_pid, signal.SIGSTOP)
    world.kill(world.server_pid)
    world.start_server()
    writing = Doing(write_at, here / "f", NEW, 0)
    assert lasts(lambda: not writing.done, 0.5)
    assert (there / "f").stat().st_size == len(OLD)  # as it is known to the host's kernel
    os.kill(world.host_pid, signal.SIGCONT)
    writing.result()
    assert (there / "f").read_bytes() == NEW


@mounted(lease=60.0)  # as above
def test_what_the_kernel_keeps_is_used(world: World) -> None:
    """Or all of this would prove nothing: it asks nobody of what it was told, until it is changed."""
    here, there = parts(world)
    (here / "f").write_bytes(OLD)
    with Looking(there / "f", mapped=True) as looking:
        warmed(there)
        before = looking.see()
        status = (there / "f").stat()
        os.kill(world.host_pid, signal.SIGSTOP)
        assert looking.see() == before and (there / "f").stat() == status
        assert errno_of(os.stat, there / "none") == errno.ENOENT
        os.kill(world.host_pid, signal.SIGCONT)
