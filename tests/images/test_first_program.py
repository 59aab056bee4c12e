# SPDX-License-Identifier: Apache-2.0
"""The image's first program, by its functions: busybox runs them here without a machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from millpond.images.build.recipe import RECIPE

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
