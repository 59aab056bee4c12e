# SPDX-License-Identifier: Apache-2.0
"""Real mounts: asynchronous creates of the host, and deaths of the processes involved.

What was synced is there. Of what came after it, the last may be missing, in their order, if the host dies, or
until it is back after the server was killed: what is there is what was there at some moment, but for files
that were taken away soon after.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.fs.client import async_create, callbacks, dir_delegations
from millpond.fs.coherence import manager
from millpond.fs.coherence.device_client import recall_directories
from millpond.fs.fuse.mounts import unmount
from millpond.fs.mount.stats_socket import read_stats

from ..effort import scaled
from ..waiting import eventually
from .conftest import World
from .support import errno_of

WithBoth = Callable[..., None]
LEASE = scaled(quick=1.0, full=2.0)
ROUNDS = scaled(quick=5, full=12)


def parts(world: World) -> tuple[Path, Path]:
    return world.device / "public" / "d", world.host / "public" / "d"


def begin(world: World) -> tuple[Path, Path]:
    """A directory that the host has exclusively."""
    device, host = parts(world)
    host.mkdir()
    for name in ("first", "second", "third"):
        (host / name).touch()
    assert asked(world, "fs.prepare")
    return device, host


def asked(world: World, kind: str) -> int:
    """How often the host's mount has asked for it."""
    (mount,) = eventually(lambda: read_stats(world.numbers, "csd0"), "the host's mount tells its numbers")
    return sum(mount.took.get(kind, ()))


def make_behind(world: World, path: Path) -> None:
    """Make a file on the host without a word to the device, as soon as the host has the directory exclusively
    again: the device has just looked.
    """

    def made() -> bool:
        path.unlink(missing_ok=True)
        before = asked(world, "fs.create")
        path.touch()
        return asked(world, "fs.create") == before

    eventually(made, "the host has the directory exclusively", every=0.05)


def names(directory: Path) -> set[str]:
    return set(os.listdir(directory))  # noqa: PTH208


def test_what_the_host_makes_behind_the_device_sees_at_once(world: World, with_both: WithBoth) -> None:
    def body() -> None:
        device, host = begin(world)
        before = names(device)
        make_behind(world, host / "new")
        asked_before = asked(world, "fs.create")
        for number in range(300):
            (host / f"{number}").touch()
        assert names(device) == before | {"new"} | {f"{number}" for number in range(300)}
        assert asked(world, "fs.create") - asked_before < 10

    with_both(body)


def test_they_are_on_the_flash_once_all_directories_are_recalled(world: World, with_both: WithBoth) -> None:
    def body() -> None:
        _, host = begin(world)
        for _ in range(3):
            make_behind(world, host / "new")
            recall_directories(world.locks)
            assert "new" in names(world.backing / "public" / "d")

    with_both(body)


@pytest.mark.parametrize("look", ["lookup", "list", "stat", "open", "make", "rename", "remove"])
def test_whatever_the_device_does_comes_after_it(world: World, with_both: WithBoth, look: str) -> None:
    def body() -> None:
        device, host = begin(world)
        os.umask(0)
        for round_ in range(3):
            name = f"new{round_}"
            make_behind(world, host / name)
            if look == "lookup":
                assert (device / name).stat().st_ino == (host / name).stat().st_ino
            elif look == "list":
                assert name in names(device)
            elif look == "stat":
                before = device.stat().st_mtime_ns
                assert before >= (device / name).stat().st_mtime_ns - 10_000_000
            elif look == "open":
                with (device / name).open("r+b", buffering=0) as file:
                    file.write(b"from the device")
                assert (host / name).read_bytes() == b"from the device"
            elif look == "make":
                assert errno_of(os.open, device / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY) == errno.EEXIST
            elif look == "rename":
                (device / name).rename(device / f"{name}-")
                assert f"{name}-" in names(host) and errno_of(os.stat, host / name) == errno.ENOENT
            else:
                (device / name).unlink()
                assert name not in names(host)
        assert names(device) == names(host)

    with_both(body)


def history(host: Path, dice: random.Random) -> tuple[list[tuple[str, bool]], int]:
    """Names that were made (True) and taken away, and how many of these were synced."""
    done: list[tuple[str, bool]] = []
    there: list[str] = []
    synced = 0
    directory = os.open(host, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(dice.randrange(20, 200)):
        if there and dice.random() < 0.4:
            name = there.pop(dice.randrange(len(there)) if dice.random() < 0.5 else -1)
            (host / name).unlink()
            done.append((name, False))
        else:
            name = f"n{number}"
            with (host / name).open("xb", buffering=0) as file:
                if dice.random() < 0.2:
                    file.write(name.encode())
                if dice.random() < 0.05:
                    os.fsync(file.fileno())
                    done.append((name, True))
                    there.append(name)
                    synced = len(done)
                    continue
            done.append((name, True))
            there.append(name)
        if dice.random() < 0.03:
            os.fsync(directory)
            synced = len(done)
    os.close(directory)
    return done, synced


def is_as_promised(found: set[str], done: list[tuple[str, bool]], synced: int) -> bool:
    """Whether it was so at some moment since the last sync, but for names that were taken away later."""
    taken = {name: number for number, (name, made) in enumerate(done) if not made}
    state: set[str] = set()
    for number in range(len(done) + 1):
        missing = state - found
        if number >= synced and found <= state and all(taken.get(name, 0) >= number for name in missing):
            return True
        if number < len(done):
            name, made = done[number]
            state = state | {name} if made else state - {name}
    return False


def test_the_promise_can_be_broken() -> None:
    done = [("a", True), ("b", True), ("b", False), ("c", True), ("d", True)]
    for found in ({"a"}, {"a", "b"}, {"a", "c"}, {"a", "c", "d"}, set()):
        assert is_as_promised(found, done, 0)
    for found in ({"b"}, {"c"}, {"a", "d"}, {"a", "b", "c"}, {"x"}):
        assert not is_as_promised(found, done, 0)
    assert not is_as_promised({"a"}, done, 4) and is_as_promised({"a", "c"}, done, 4)


@pytest.mark.parametrize("victim", ["host", "server"])
def test_what_is_left_of_names_made_behind(
    world: World, with_both: WithBoth, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "_CONTENDED_SECONDS", 0.0)
    monkeypatch.setattr(dir_delegations, "_REFUSED_SECONDS", 0.0)
    monkeypatch.setattr(async_create, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(callbacks, "_AGAIN_SECONDS", 0.05)
    if victim == "host":  # which is waited for
        world.lease = LEASE

    def body() -> None:
        dice, lost = random.Random(7), 0
        for round_ in itertools.count():
            replayed = victim == "server" and asked(world, "fs.replay")
            if round_ >= ROUNDS and (lost or replayed):
                break
            assert round_ < 10 * ROUNDS, "nothing was kept back"
            device, host = world.device / "public" / f"d{round_}", world.host / "public" / f"d{round_}"
            host.mkdir(mode=0o777)
            done, synced = history(host, dice)
            if victim == "host":
                world.kill(world.host_pid)
            else:
                world.kill(world.server_pid)
                world.start_server()
            found = names(device)
            assert is_as_promised(found, done, synced), (found, done, synced)
            made, taken = ({name for name, is_made in done if is_made is which} for which in (True, False))
            lost += len(made - taken - found)
            if victim == "host":
                unmount(world.host)
                world.mount_host()
            else:  # the host tells the next server
                for side in (host, device):
                    eventually(functools.partial(_agree, side, made - taken), "both see all names")

    with_both(body)


def _agree(host: Path, found: set[str]) -> bool:
    with contextlib.suppress(OSError):
        return names(host) == found
    return False


def test_a_host_that_stands_still_holds_up_who_looks_for_its_lease_only(
    world: World, with_both: WithBoth
) -> None:
    world.lease = LEASE

    def body() -> None:
        device, host = begin(world)
        make_behind(world, host / "told")
        eventually(lambda: (world.backing / "public" / "d" / "told").exists(), "the name is on the flash")
        os.kill(world.host_pid, signal.SIGSTOP)
        start = time.monotonic()
        assert "told" in names(device)
        assert time.monotonic() - start < 10 * LEASE
        (device / "new").touch()
        os.kill(world.host_pid, signal.SIGCONT)
        eventually(lambda: _agree(host, names(device)), "the host sees the same names")

    with_both(body)


def test_nothing_is_lost_by_an_unmount(world: World, with_both: WithBoth) -> None:
    def body() -> None:
        device, host = begin(world)
        make_behind(world, host / "new")
        for number in range(50):
            (host / f"{number}").touch()
        os.kill(world.host_pid, signal.SIGTERM)
        os.waitpid(world.host_pid, 0)
        assert {"new"} | {f"{number}" for number in range(50)} <= names(device)

    with_both(body)
