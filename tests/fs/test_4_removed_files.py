# SPDX-License-Identifier: Apache-2.0
"""Real mounts: what a host removes takes no room on the flash, whatever the device's kernel remembers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.fs.fuse import abi
from millpond.fs.fuse.mounts import unmount

from ..waiting import eventually
from .conftest import WithBoth, mounted
from .test_4_coherence import write_at
from .world import World

MIB = 1 << 20
SIZE = 8 * MIB


def holds_removed(world: World) -> bool:
    """Whether the device's mount has a descriptor of a file of the flash that has no name."""
    flash = world.backing.stat().st_dev
    for descriptor in Path(f"/proc/{world.device_pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            status = descriptor.stat()
            if status.st_dev == flash and not status.st_nlink:
                return True
    return False


def free(place: Path) -> int:
    """Bytes. A host that asks for them has itself forgotten what it has removed by then."""
    there = os.statvfs(place)
    return there.f_bavail * there.f_frsize


def replace(file: Path) -> None:
    (file.parent / "new").touch()
    (file.parent / "new").rename(file)


def remove_elsewhere(file: Path) -> None:
    (file.parent / "d").mkdir(exist_ok=True)
    file.rename(file.parent / "d" / "g")
    (file.parent / "d" / "g").unlink()


USES: dict[str, Callable[[Path], object]] = {
    "looked at": Path.stat,
    "read": Path.read_bytes,
    "written": lambda file: write_at(file, b"data", 0),
}
REMOVALS: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "replaced": replace,
    "removed after a change": lambda file: (file.chmod(0o600), file.unlink()),  # of it nothing is cached
}


@pytest.fixture(params=[True, False])
def prunes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernel finds the files that it is to forget by their nodes, as Linux 6.18 does."""
    prunes: bool = request.param
    if not prunes:
        monkeypatch.setattr(abi, "PRUNE_SINCE", 1000)
    return prunes


def test_what_a_host_removes_gives_its_room_back(world: World, with_both: WithBoth, prunes: bool) -> None:
    def body() -> None:
        device, host = world.device / "public", world.host / "public"
        (host / "first").touch()
        before = free(host)
        elsewhere = {"removed elsewhere": remove_elsewhere} if prunes else {}
        for used, use in USES.items():
            for removed, away in {**REMOVALS, **elsewhere}.items():
                (host / "f").write_bytes(bytes(SIZE))
                use(device / "f")
                assert free(host) < before - SIZE // 2
                away(host / "f")
                what = f"room for what was {used} and {removed}"
                eventually(lambda: free(host) > before - MIB, what)
                eventually(lambda: not holds_removed(world), what)

    with_both(body, "64m")


@pytest.mark.usefixtures("prunes")
def test_what_the_device_removes_gives_its_room_back(world: World, with_both: WithBoth) -> None:
    def body() -> None:
        device, host = world.device / "public", world.host / "public"
        before = free(world.backing)
        for (used, use), (removed, away) in zip(USES.items(), REMOVALS.items(), strict=True):
            (host / "f").write_bytes(bytes(SIZE))
            use(host / "f")
            away(device / "f")
            what = f"room for what was {used} and {removed}"
            eventually(lambda: free(world.backing) > before - MIB, what)
            (device / "f").unlink(missing_ok=True)

    with_both(body, "64m")


@mounted(size="64m")
def test_a_host_that_unmounts_has_nothing_open(world: World) -> None:
    before = free(world.backing)
    (world.host / "public" / "f").write_bytes(bytes(SIZE))
    with (world.host / "public" / "f").open():
        (world.device / "public" / "f").unlink()
    unmount(world.host)
    eventually(lambda: free(world.backing) > before - MIB, "room")


@mounted(size="64m")
def test_a_file_that_a_program_has_open_is_there_until_it_is_closed(world: World) -> None:
    device, host = world.device / "public", world.host / "public"
    before = free(host)
    (host / "f").write_bytes(bytes(SIZE))
    with (device / "f").open("rb") as opened:
        (host / "f").unlink()
        assert not (device / "f").exists()
        assert len(opened.read()) == SIZE and free(host) < before - SIZE // 2
    eventually(lambda: free(host) > before - MIB, "room")


@mounted(lease=1.0, size="64m")
def test_what_was_removed_while_no_server_was_there_gives_its_room_back(world: World) -> None:
    before = free(world.backing)
    (world.host / "public" / "f").write_bytes(bytes(SIZE))
    assert len((world.device / "public" / "f").read_bytes()) == SIZE
    world.kill(world.server_pid)
    (world.backing / "public" / "f").unlink()
    assert free(world.backing) < before - SIZE // 2
    world.start_server()
    eventually(lambda: free(world.backing) > before - MIB, "room", seconds=20)
