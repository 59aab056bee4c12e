# SPDX-License-Identifier: Apache-2.0
"""A device tests itself: it passes only if the guest says so, and switches itself off."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from millpond.host.emulation import qemu_devices
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import read
from millpond.images import boards
from millpond.images.ondevice.self_test import CHECKS, FAILED, FAMILY, PASSED
from millpond.images.runtime.qemu import QemuBoard, QemuSpec

from ..system.qemu import BOOT_SECONDS, NAME

pytestmark = pytest.mark.timeout(900)


def run(image: Path, folder: Path) -> tuple[str, int | None]:
    """What the device wrote to its console, and how QEMU ended; None if it did not."""
    provisioning.create(folder, "alone", [])
    fleet = qemu_devices.ensure(read(folder), 1, image)
    asked = ("-smbios", f"type=1,family={FAMILY}")
    spec = QemuSpec(NAME, fleet.device_directory(NAME), boards.read("qemu-virt"), asked)
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
