# SPDX-License-Identifier: Apache-2.0
"""A device tests itself: it passes only if the guest says so, and switches itself off."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from millpond.host.emulation import qemu_devices
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import read
from millpond.images import boards
from millpond.images.ondevice.self_test import CHECKS, FAILED, FAMILY, PASSED
from millpond.images.runtime.qemu import USER, QemuBoard, QemuSpec, drops_privileges

from ..system.qemu import BOOT_SECONDS, NAME

pytestmark = pytest.mark.timeout(900)


DECOY = "decoy.img"
_SECOND_DISK = (
    "-drive",
    f"if=none,id=decoy,format=raw,file={DECOY}",
    "-device",
    "virtio-blk-pci,drive=decoy,romfile=",
)


def run(image: Path, folder: Path, decoy: Path | None = None) -> tuple[str, int | None]:
    """What the device, with the ``decoy`` as a second disk, wrote to its console, and how QEMU ended; None if
    it did not.
    """
    provisioning.create(folder, "alone", [])
    fleet = qemu_devices.ensure(read(folder), 1, image)
    hardware: tuple[str, ...] = ()
    if decoy:
        hardware = _SECOND_DISK
        placed = decoy.rename(fleet.device_directory(NAME) / DECOY)
        if drops_privileges():
            os.chown(placed, USER, USER)
    asked = ("-smbios", f"type=1,family={FAMILY}")
    spec = QemuSpec(NAME, fleet.device_directory(NAME), boards.read("qemu-virt"), (*asked, *hardware))
    board, end = QemuBoard(spec), time.monotonic() + BOOT_SECONDS
    try:
        board.power_on()
        while board.exit_code is None and time.monotonic() < end:
            time.sleep(0.5)
        code = board.exit_code
    finally:
        board.power_off(0)
    return (spec.directory / "console.log").read_text(errors="replace"), code


@pytest.mark.expected_log("qemu0 does not shut down; its power is cut")
def test_the_device_says_itself_that_it_works(image: Path, tmp_path: Path) -> None:
    console, code = run(image, tmp_path / "fleet")
    assert PASSED in console and FAILED not in console, console[-6000:]
    assert code == 0
    for check in CHECKS:
        assert f"self-test: {check.__name__}: yes" in console


@pytest.mark.expected_log("qemu0 does not shut down; its power is cut")
def test_another_disk_with_partitions_of_the_same_names_is_left_alone(image: Path, tmp_path: Path) -> None:
    """The root, the state and the identity were those of whichever disk was found first."""
    provisioning.create(tmp_path / "others", "others", [])
    others = qemu_devices.ensure(read(tmp_path / "others"), 2, image)
    decoy = others.device_directory("qemu1") / "disk.img"
    before = hashlib.sha256(decoy.read_bytes()).digest()
    console, code = run(image, tmp_path / "fleet", decoy)
    assert f"millpond: this device is {NAME}" in console and "qemu1" not in console, console[-6000:]
    assert PASSED in console and FAILED not in console, console[-6000:]
    assert code == 0
    after = read(tmp_path / "fleet").device_directory(NAME) / DECOY
    assert hashlib.sha256(after.read_bytes()).digest() == before
