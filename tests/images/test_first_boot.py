# SPDX-License-Identifier: Apache-2.0
"""The first program of a board, and the first boot: its identity, taken over once and whole from its seed."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images.build.recipe import RECIPE
from millpond.images.format import seed
from millpond.images.ondevice import provision

from ..effort import scaled

FILES = {"agent.toml": 'name = "csd3"\n', "key.pem": "secret", "ssh_host_key": "s" * 9000}
_STEPS = {"open", "fsync", "fchmod", "write", "flush", "rename", "mkdir", "rmdir", "unlink", "close", "seek"}


def make_seed(path: Path, files: dict[str, str] = FILES) -> Path:
    etc = path.with_name("etc")
    etc.mkdir(exist_ok=True)
    for name, text in files.items():
        (etc / name).write_text(text)
        (etc / name).chmod(0o600 if name == "key.pem" else 0o664)
    path.write_bytes(seed.seed(etc).ljust(1 << 20, b"\0"))
    return path


def found(identity: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in identity.iterdir()} if identity.exists() else {}


def test_an_identity_is_taken_over_once_and_the_seed_is_wiped(tmp_path: Path) -> None:
    given, identity = make_seed(tmp_path / "seed"), tmp_path / "state" / "identity"
    before = os.umask(0o077)
    try:
        assert provision.take_over(given, identity)
    finally:
        os.umask(before)
    assert found(identity) == FILES
    assert stat.S_IMODE((identity / "key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE((identity / "agent.toml").stat().st_mode) == 0o664
    assert given.read_bytes() == seed.WIPED + bytes(seed.MAX_TAR)
    assert not provision.take_over(given, identity)
    assert found(identity) == FILES
    assert [path.name for path in identity.parent.iterdir()] == ["identity"]


def test_what_is_no_identity_is_replaced_whole(tmp_path: Path) -> None:
    given, identity = make_seed(tmp_path / "seed"), tmp_path / "identity"
    identity.mkdir()
    (identity / "of-former-days").touch()
    assert provision.take_over(given, identity)
    assert found(identity) == FILES


def test_the_seed_of_another_identity_is_refused_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk with a seed took over a device, its authority, and with its keys the private part."""
    given, identity = make_seed(tmp_path / "seed"), tmp_path / "identity"
    assert provision.take_over(given, identity)
    other = make_seed(tmp_path / "seed", FILES | {"key.pem": "another"}).read_bytes()
    assert provision.refresh(given, identity) == "csd3"
    assert "the device has an identity" in capsys.readouterr().out
    assert found(identity) == FILES
    assert given.read_bytes() == other


def partitions(sys: Path, disk: str, minor: int, names: tuple[str, ...]) -> None:
    """Make a disk with these partitions in a tree of /sys."""
    (sys / "dev/block").mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names, 1):
        node = sys / "devices" / disk / f"{disk}p{number}"
        node.mkdir(parents=True)
        (node / "partition").write_text(f"{number}\n")
        (node / "uevent").write_text(f"DEVNAME={disk}p{number}\nPARTNAME={name}\n")
        (sys / "dev/block" / f"259:{minor + number}").symlink_to(node)


def test_the_seed_is_that_of_the_disk_which_was_booted(tmp_path: Path) -> None:
    partitions(tmp_path, "mmcblk0", 0, ("seed", "rootA"))
    partitions(tmp_path, "nvme0n1", 8, ("espA", "rootA", "seed"))
    partitions(tmp_path, "nvme1n1", 16, ("rootA", "public"))
    assert provision.seed_partition(os.makedev(259, 10), tmp_path) == Path("/dev/nvme0n1p3")
    assert provision.seed_partition(os.makedev(259, 2), tmp_path) == Path("/dev/mmcblk0p1")
    assert provision.seed_partition(os.makedev(259, 17), tmp_path) is None
    assert provision.seed_partition(os.makedev(0, 31), tmp_path) is None  # not on a disk


def test_a_root_that_is_verified_lies_on_the_disk_of_its_partition(tmp_path: Path) -> None:
    """The root is a device of its own, made of the partition; that has no seed beside it."""
    partitions(tmp_path, "mmcblk0", 0, ("espA", "seed", "rootA"))
    mapped = tmp_path / "devices/virtual/block/dm-0"
    (mapped / "slaves").mkdir(parents=True)
    (mapped / "slaves/mmcblk0p3").symlink_to(tmp_path / "devices/mmcblk0/mmcblk0p3")
    (tmp_path / "dev/block/254:0").symlink_to(mapped)
    assert provision.seed_partition(os.makedev(254, 0), tmp_path) == Path("/dev/mmcblk0p2")


def _killed_at(step: int, given: Path, identity: Path) -> bool:
    """Take over in a child that is killed just before its so-manieth step; whether it came so far."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    count = 0

    def watch(_frame: object, event: str, called: object) -> None:
        nonlocal count
        if event == "c_call" and getattr(called, "__name__", "") in _STEPS:
            count += 1
            if count == step:
                os.kill(os.getpid(), 9)

    try:
        sys.setprofile(watch)
        provision.take_over(given, identity)
    finally:
        sys.setprofile(None)  # what coverage does at the end is no step
        os._exit(0)


def test_however_it_is_cut_it_is_whole_after_the_next_boot(tmp_path: Path) -> None:
    given, identity, step = tmp_path / "seed", tmp_path / "state" / "identity", 0
    cut = True
    while cut:
        step += scaled(3, 1)
        assert step < 1000
        make_seed(given)
        shutil.rmtree(identity, ignore_errors=True)
        cut = _killed_at(step, given, identity)
        assert found(identity) in ({}, FILES), f"half of it after step {step}"
        provision.take_over(given, identity)
        assert found(identity) == FILES, f"after step {step}"
        assert not given.read_bytes()[seed.HEADER :].strip(b"\0"), f"secrets are left after step {step}"
    assert step > 20  # all files, folders, renames and the wiping


def test_a_wiping_that_a_power_cut_tears_is_no_damaged_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written between two syncs may be on the disk in any part: here sector by sector, by chance."""
    given, identity = make_seed(tmp_path / "seed"), tmp_path / "identity"
    states, fsync = [given.read_bytes()], os.fsync

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        if os.fstat(descriptor).st_ino == given.stat().st_ino:
            states.append(given.read_bytes())

    monkeypatch.setattr(os, "fsync", noting)
    provision.take_over(given, identity)
    monkeypatch.undo()
    assert len(states) > 1
    chance = random.Random(1)
    for before, after in itertools.pairwise(states):
        for share in (0.0, 0.1, 0.5, 0.9, 1.0) * scaled(1, 4):
            sectors = range(0, len(before), 512)
            torn = b"".join((after if chance.random() < share else before)[at : at + 512] for at in sectors)
            given.write_bytes(torn)
            provision.take_over(given, identity)
            assert found(identity) == FILES
            assert not given.read_bytes()[seed.HEADER :].strip(b"\0")


def test_a_damaged_seed_gives_no_identity_and_stays(tmp_path: Path) -> None:
    given, identity = make_seed(tmp_path / "seed"), tmp_path / "identity"
    damaged = bytearray(given.read_bytes())
    damaged[2000] ^= 1
    given.write_bytes(damaged)
    with pytest.raises(LocalError, match="damaged"):
        provision.take_over(given, identity)
    with pytest.raises(LocalError, match="damaged"):
        provision.refresh(given, identity)
    assert not identity.exists()
    assert given.read_bytes() == damaged


def test_a_device_with_an_identity_needs_no_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, identity = make_seed(tmp_path / "seed"), tmp_path / "identity"
    assert provision.refresh(given, identity) == "csd3"
    given.write_bytes(b"x" * 4096)
    assert provision.refresh(given, identity) == "csd3"
    assert "the identity stays as it is" in capsys.readouterr().out
    given.unlink()
    assert provision.refresh(given, identity) == "csd3"
    assert provision.refresh(None, identity) == "csd3"
    assert found(identity) == FILES


def test_without_seed_and_identity_a_device_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(provision, "seed_partition", lambda _device, _sys: tmp_path / "seed")
    monkeypatch.setattr(provision, "IDENTITY", tmp_path / "identity")
    monkeypatch.setattr(provision, "HOST_NAME", tmp_path / "hostname")
    assert provision.main() == 1
    assert "flash it with --device NAME" in capsys.readouterr().out
    (tmp_path / "seed").write_bytes(bytes(1 << 20))  # flashed without --device
    assert provision.main() == 1
    assert "flash it with --device NAME" in capsys.readouterr().out
    make_seed(tmp_path / "seed")
    assert provision.main() == 0
    assert (tmp_path / "hostname").read_text() == "csd3"


BUSYBOX = shutil.which("busybox")
pytestmark = pytest.mark.skipif(BUSYBOX is None, reason="needs busybox: sudo apt install busybox")
PROGRAM = (RECIPE / "initrd-init").read_text()


def function(name: str) -> str:
    found = re.search(rf"^{name}\(\) \{{.*?^\}}$", PROGRAM, re.M | re.S)
    assert found
    return found[0]


def waiting() -> str:
    found = re.search(r"^for try in.*?^done$", PROGRAM, re.M | re.S)
    assert found
    return found[0].replace("/dev/console", "/dev/stderr")


def sh(script: str) -> subprocess.CompletedProcess[str]:
    assert BUSYBOX
    return subprocess.run([BUSYBOX, "sh", "-c", script], capture_output=True, text=True, timeout=60)


def wait_for_a_disk(folder: Path, comes_after: int) -> tuple[float, str, str]:
    """Return how long it waits for a disk that is there after so many looks, and what it says."""
    clock = folder / "busybox"
    clock.write_text(f'#!/bin/sh\n[ "$1" = sleep ] && echo "$2" >>{folder}/slept || exec {BUSYBOX} "$@"\n')
    clock.chmod(0o755)
    (folder / "slept").touch()
    find = f'find_disk() {{ looks=$((looks + 1)); [ "$looks" -gt {comes_after} ] && found=1; }}'
    done = sh(f"b={clock} looks=0 found=0\n{find}\n{waiting()}\necho $found")
    return sum(map(float, (folder / "slept").read_text().split())), done.stdout.strip(), done.stderr


def test_a_disk_that_is_there_is_taken_at_once(tmp_path: Path) -> None:
    assert wait_for_a_disk(tmp_path, 0) == (0, "1", "")


def test_a_disk_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """After 10 s the machine restarted, for ever: bridges and disks that spin up take longer."""
    waited, found, said = wait_for_a_disk(tmp_path, 150)
    assert waited > 30 and found == "1" and said.count("waiting for the disk") == 1


def test_the_wait_leaves_the_watchdog_time_to_read_the_root(tmp_path: Path) -> None:
    waited, found, _ = wait_for_a_disk(tmp_path, 10_000)
    assert found == "0" and 60 < waited < 200
    assert "watchdog -F -t 60 -T 300" in PROGRAM


def test_only_a_damaged_slot_is_left_for_the_other() -> None:
    """A kept slot was left for the one before where its disk came late."""
    assert '[ "$found" = 1 ] && choose_other' in PROGRAM


def test_a_machine_is_the_same_to_its_journal_at_each_boot(tmp_path: Path) -> None:
    """Where firmware told no UUID it was another one each time: each left 8 MiB of journal for ever."""
    guid = uuid.uuid4()
    (tmp_path / "disk").write_bytes(bytes(512) + b"EFI PART".ljust(56, b"x") + guid.bytes_le + b"y" * 4000)
    script = function("machine").replace("/dev/$1", "$1")
    for _boot in range(2):
        done = sh(f"b={BUSYBOX}\n{script}\nmachine {tmp_path}/disk")
        assert done.stdout == guid.bytes_le.hex() and re.fullmatch("[0-9a-f]{32}", done.stdout)
    assert "product_uuid" not in PROGRAM
    assert 'machine "$disk" >/run/millpond-machine\n' in PROGRAM


def test_journals_of_another_machine_are_removed(tmp_path: Path) -> None:
    """journald counts that of its own machine-id alone."""
    unit = RECIPE / "root/etc/systemd/system/systemd-journal-flush.service.d/one-journal.conf"
    found = re.search(r"^ExecStartPre=-/bin/sh -c '(.*)'$", unit.read_text(), re.M)
    assert found
    journal, machine = tmp_path / "journal", tmp_path / "machine-id"
    for name in ("a" * 32, "b" * 32):
        (journal / name).mkdir(parents=True)
        (journal / name / "system.journal").touch()
    machine.write_text("b" * 32 + "\n")
    line = found[1].replace("$$", "$").replace("/var/log/journal", str(journal))
    assert sh(line.replace("/etc/machine-id", str(machine))).returncode == 0
    assert [path.name for path in journal.iterdir()] == ["b" * 32]
