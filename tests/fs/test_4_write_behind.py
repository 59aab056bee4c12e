# SPDX-License-Identifier: Apache-2.0
"""Real mounts: small writes of the host are gathered; the device sees them, and no error is lost."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.fs.client import write_behind
from millpond.fs.fuse.mounts import unmount
from millpond.fs.mount.stats_socket import read_stats

from ..waiting import eventually
from .conftest import World
from .support import errno_of

WithBoth = Callable[..., None]
BLOCK = 8 << 10
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


def asked(world: World, kind: str) -> int:
    """How often the host's mount has asked for it."""
    (mount,) = eventually(lambda: read_stats(world.numbers, "csd0"), "the host's mount tells its numbers")
    return sum(mount.took.get(kind, ()))


def make(path: Path, flags: int = os.O_RDWR) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | flags, 0o644)


def gathered(world: World, path: Path, data: bytes = b"data", flags: int = os.O_RDWR) -> int:
    """A new file of the host with data that the device does not have."""
    file, before = make(path, flags), asked(world, "fs.write")
    os.write(file, data)
    assert asked(world, "fs.write") == before
    return file


def test_small_writes_are_few_requests(world: World, with_both: WithBoth, patience: None) -> None:
    def body() -> None:
        device, host = begin(world)
        file = gathered(world, host / "f")
        before, data = asked(world, "fs.write"), os.urandom(BLOCK)
        for number in range(1024):
            assert os.pwrite(file, data, number * BLOCK) == BLOCK
        os.fsync(file)
        assert asked(world, "fs.write") < before + 100
        assert (device / "f").read_bytes() == data * 1024
        os.close(file)

    with_both(body)


@pytest.mark.parametrize("how", ["read", "stat", "append", "map"])
def test_the_device_sees_it_at_once(world: World, with_both: WithBoth, patience: None, how: str) -> None:
    def body() -> None:
        device, host = begin(world)
        file = gathered(world, host / "f")
        if how == "read":
            assert (device / "f").read_bytes() == b"data"
        elif how == "stat":
            assert (device / "f").stat().st_size == 4
        elif how == "append":
            with (device / "f").open("ab", buffering=0) as other:
                other.write(b"more")
            os.pwrite(file, b"D", 0)
            assert os.pread(file, 9, 0) == b"Datamore" == (device / "f").read_bytes()
        else:
            with (device / "f").open("rb") as other:
                assert mmap.mmap(other.fileno(), 4, prot=mmap.PROT_READ)[:] == b"data"
        os.close(file)

    with_both(body)


def arrives(flash: Path, found: bytes) -> bool:
    return flash.exists() and flash.read_bytes() == found


@pytest.mark.parametrize("how", ["close", "dup", "fork", "killed", "lock", "map"])
def test_whoever_ends_first_has_it_sent(world: World, with_both: WithBoth, patience: None, how: str) -> None:
    def body() -> None:
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

    with_both(body)


@pytest.mark.parametrize("flags", [os.O_SYNC, os.O_DSYNC])
def test_what_is_to_be_on_the_flash_is(world: World, with_both: WithBoth, patience: None, flags: int) -> None:
    def body() -> None:
        _, host = begin(world)
        file = make(host / "f", os.O_WRONLY | flags)
        os.write(file, b"data")
        assert (world.backing / "public" / "d" / "f").read_bytes() == b"data"
        os.close(file)

    with_both(body)


def test_a_full_flash_is_told_at_the_latest_at_the_close(world: World, with_both: WithBoth) -> None:
    def body() -> None:
        os.umask(0)
        _, host = begin(world)
        file, written, seen = gathered(world, host / "f", b""), 0, 0
        try:
            while written < 128 << 20:
                written += os.write(file, bytes(1 << 16))
        except OSError as error:
            seen = error.errno or 0
        if not seen:
            seen = errno_of(os.close, file) or 0
        assert seen == errno.ENOSPC

    with_both(body, size="100m")


@pytest.mark.parametrize("victim", ["host", "server"])
def test_what_was_closed_or_synced_outlives_everyone(
    world: World, with_both: WithBoth, patience: None, victim: str
) -> None:
    def body() -> None:
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

    with_both(body)


def test_nothing_is_lost_by_an_unmount(world: World, with_both: WithBoth, patience: None) -> None:
    def body() -> None:
        device, host = begin(world)
        gathered(world, host / "f")
        os.kill(world.host_pid, signal.SIGTERM)
        os.waitpid(world.host_pid, 0)
        assert (device / "f").read_bytes() == b"data"

    with_both(body)


@pytest.mark.parametrize("changed", [False, True])
def test_a_host_that_stands_still_holds_up_who_looks_for_its_lease_only(
    world: World, with_both: WithBoth, patience: None, changed: bool
) -> None:
    """What it had gathered comes late, if nobody has changed the file meanwhile."""
    world.lease = LEASE

    def body() -> None:
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

    with_both(body)


def test_both_sides_append_without_a_gap(world: World, with_both: WithBoth) -> None:
    def body() -> None:
        device, host = begin(world)
        os.close(gathered(world, host / "f", b"h0000\n", os.O_WRONLY | os.O_APPEND))

        def fill(path: Path, who: str) -> None:
            file = os.open(path, os.O_WRONLY | os.O_APPEND)
            for number in range(1, 100):
                os.write(file, f"{who}{number:04}\n".encode())
            os.close(file)

        threads = [
            threading.Thread(target=fill, args=arguments)
            for arguments in ((host / "f", "h"), (device / "f", "d"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lines = (device / "f").read_text().splitlines()
        for who in "hd":
            found = [line for line in lines if line[0] == who]
            assert found == [f"{who}{number:04}" for number in range(who == "d", 100)]

    with_both(body)
