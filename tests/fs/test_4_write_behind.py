# SPDX-License-Identifier: Apache-2.0
"""Real mounts: small writes of the host are gathered; the device sees them, and no error is lost."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import time
from pathlib import Path

import pytest

from millpond.fs.client import write_behind
from millpond.fs.fuse.mounts import unmount

from ..waiting import eventually
from .conftest import mounted, stats
from .support import errno_of
from .world import World

LEASE = 1.0


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent by the clock."""
    monkeypatch.setattr(write_behind, "_TICK_SECONDS", 1000.0)


def begin(world: World) -> tuple[Path, Path]:
    """A directory of the host, on the device and on the host."""
    device, host = world.device / "public" / "d", world.host / "public" / "d"
    host.mkdir()
    return device, host


def make(path: Path, flags: int = os.O_RDWR) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | flags, 0o644)


def gathered(world: World, path: Path, data: bytes = b"data", flags: int = os.O_RDWR) -> int:
    """A new file of the host with data that the device does not have."""
    file, before = make(path, flags), stats(world).took.get("fs.write", ())
    os.write(file, data)
    assert stats(world).took.get("fs.write", ()) == before
    return file


@mounted()
def test_the_device_maps_it_at_once(world: World, patience: None) -> None:
    device, host = begin(world)
    file = gathered(world, host / "f")
    with (device / "f").open("rb") as other:
        assert mmap.mmap(other.fileno(), 4, prot=mmap.PROT_READ)[:] == b"data"
    os.close(file)


def arrives(flash: Path, found: bytes) -> bool:
    return flash.exists() and flash.read_bytes() == found


@pytest.mark.parametrize("how", ["close", "dup", "fork", "killed", "lock", "map"])
@mounted()
def test_whoever_ends_first_has_it_sent(world: World, patience: None, how: str) -> None:
    _, host = begin(world)
    flash = world.backing / "public" / "d" / "f"
    if how == "killed":
        pid = os.fork()
        if pid == 0:
            gathered(world, host / "f")
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        eventually(lambda: arrives(flash, b"data"), "it is sent")
        return
    file = gathered(world, host / "f")
    if how == "close":
        os.close(file)
    elif how == "dup":
        os.close(os.dup(file))
    elif how == "fork":
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    elif how == "lock":
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.write(file, b"more")
        fcntl.lockf(file, fcntl.LOCK_UN)
    else:
        shared = mmap.mmap(file, 4)
        shared[:2] = b"DA"
        shared.flush()
    assert flash.read_bytes() == {"lock": b"datamore", "map": b"DAta"}.get(how, b"data")


@pytest.mark.parametrize("flags", [os.O_SYNC, os.O_DSYNC, os.O_DIRECT])
@mounted()
def test_what_is_to_be_on_the_flash_is(world: World, patience: None, flags: int) -> None:
    _, host = begin(world)
    file = make(host / "f", os.O_WRONLY | flags)
    os.write(file, b"data")
    assert (world.backing / "public" / "d" / "f").read_bytes() == b"data"
    os.close(file)


@pytest.mark.parametrize("victim", ["host", "server"])
@mounted()
def test_what_was_closed_or_synced_outlives_everyone(world: World, patience: None, victim: str) -> None:
    _, host = begin(world)
    flash = world.backing / "public" / "d"
    files = {f"n{number}": os.urandom(100) for number in range(20)}
    for name, data in files.items():
        with (host / name).open("xb", buffering=0) as file:
            file.write(data[:50])
            file.write(data[50:])
    synced, left = gathered(world, host / "synced"), gathered(world, host / "open")
    os.fsync(synced)
    os.write(synced, b"more")
    if victim == "host":
        world.kill(world.host_pid)
        unmount(world.host)
        assert errno_of(os.close, left) == errno.ENOTCONN
    else:
        world.kill(world.server_pid)
        world.start_server()
        os.umask(0)
        for file in (synced, left):
            assert errno_of(os.close, file) is None
    rest = b"" if victim == "host" else b"more"
    assert (flash / "synced").read_bytes() == b"data" + rest
    assert (flash / "open").read_bytes() == (b"" if victim == "host" else b"data")
    assert {name: (flash / name).read_bytes() for name in files} == files


@mounted()
def test_nothing_is_lost_by_an_unmount(world: World, patience: None) -> None:
    device, host = begin(world)
    gathered(world, host / "f")
    os.kill(world.host_pid, signal.SIGTERM)
    os.waitpid(world.host_pid, 0)
    assert (device / "f").read_bytes() == b"data"


@pytest.mark.parametrize("changed", [False, True])
@mounted(lease=LEASE)
def test_a_host_that_stands_still_holds_up_who_looks_for_its_lease_only(
    world: World, patience: None, changed: bool
) -> None:
    """What it had gathered comes late, if nobody has changed the file meanwhile."""
    device, host = begin(world)
    file = gathered(world, host / "f")
    os.kill(world.host_pid, signal.SIGSTOP)
    start = time.monotonic()
    assert (device / "f").read_bytes() == b""
    assert time.monotonic() - start < 10 * LEASE
    if changed:
        (device / "f").write_bytes(b"other")
    os.kill(world.host_pid, signal.SIGCONT)
    assert errno_of(os.close, file) == (errno.EIO if changed else None)
    assert (device / "f").read_bytes() == (b"other" if changed else b"data") == (host / "f").read_bytes()
