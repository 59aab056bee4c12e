# SPDX-License-Identifier: Apache-2.0
"""The health of drives, by made-up trees of sysfs and bytes of the SMART log."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from pathlib import Path

import pytest

from millpond.agent.health import drive, smart
from millpond.agent.health.drive import health
from millpond.wire.control_messages import DriveHealth

from ..waiting import eventually


def place(sysfs: Path, flash: Path, block: str, **files: str) -> None:
    """Make the partition that ``flash`` lies on, of a drive with these files."""
    number = flash.stat().st_dev
    folder = sysfs / "devices" / block
    folder.mkdir(parents=True)
    link = sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(folder)
    for name, text in files.items():
        path = folder.parent / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("block", "files", "found"),
    [
        (
            "soc/mmc0/block/mmcblk0/mmcblk0p4",
            {"device__life_time": "0x02 0x01\n", "device__pre_eol_info": "0x01\n"},
            DriveHealth("emmc", 0.2),
        ),
        (
            "soc/mmc0/block/mmcblk0/mmcblk0p4",
            {"device__life_time": "0x0b 0x01\n", "device__pre_eol_info": "0x03\n"},
            DriveHealth("emmc", 1.1, "its spare blocks are used up"),
        ),
        (
            "soc/ufs/sda",
            {
                "health_descriptor__life_time_estimation_a": "0x01\n",
                "health_descriptor__life_time_estimation_b": "0x05\n",
                "health_descriptor__eol_info": "0x02\n",
            },
            DriveHealth("ufs", 0.5, "its spare blocks run out"),
        ),
        (
            "soc/mmc0/block/mmcblk0/mmcblk0p4",
            {"device__life_time": "0x00 0x00\n", "device__pre_eol_info": "0x00\n"},
            DriveHealth("emmc"),
        ),
        ("pci/nvme0/nvme0n1/nvme0n1p2", {}, DriveHealth("nvme")),
        ("soc/mmc0/block/mmcblk0/mmcblk0p4", {"device__life_time": "?"}, DriveHealth("unknown")),
        ("virtual/block/loop0", {}, DriveHealth("unknown")),
    ],
)
def test_a_drive_tells_its_wear(
    tmp_path: Path, block: str, files: dict[str, str], found: DriveHealth
) -> None:
    place(tmp_path / "sys", tmp_path, block, **files)
    seen = health(tmp_path, tmp_path / "sys", tmp_path)
    assert (seen.kind, seen.warning) == (found.kind, found.warning)
    assert seen.wear == (None if found.wear is None else pytest.approx(found.wear))


def test_a_folder_on_no_drive_has_none_that_is_known(tmp_path: Path) -> None:
    assert health(tmp_path / "none", tmp_path) == health(tmp_path, tmp_path) == DriveHealth("unknown")


@pytest.mark.parametrize(
    ("warning", "used", "found"),
    [
        (0, 7, DriveHealth("nvme", 0.07)),
        (0b101, 255, DriveHealth("nvme", 2.55, "its spare blocks run out; it is no longer reliable")),
        (0b1100_0000, 0, DriveHealth("nvme", 0.0)),
    ],
)
def test_the_smart_log_of_an_nvme_drive_is_read(warning: int, used: int, found: DriveHealth) -> None:
    log = bytearray(smart.SIZE)
    log[0], log[5] = warning, used
    assert smart.parsed(bytes(log)) == found


@pytest.mark.parametrize(("status", "wear"), [(0, 0.42), (0x102, None)])
def test_an_nvme_drive_is_asked_for_its_smart_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, wear: float | None
) -> None:
    """The command is that of linux/nvme_ioctl.h; the test answers in the kernel's place."""

    def answer(descriptor: int, request: int, *arguments: bytearray) -> int:
        if request != 0xC0504E47:  # NVME_IOCTL_ADMIN64_CMD
            return 1
        opcode, namespace, address, size, cdw10 = struct.unpack("<B3xI16xQ4xII", arguments[0][:44])
        assert (opcode, namespace, size, cdw10) == (2, 0xFFFFFFFF, 512, 0x7F0002)
        ctypes.memmove(address + 5, b"\x2a", 1)
        return status

    place(tmp_path / "sys", tmp_path, "virtual/nvme-subsystem/nvme-subsys0/nvme0n1/nvme0n1p2")
    (tmp_path / "ng0n1").touch()
    monkeypatch.setattr("fcntl.ioctl", answer)
    expected = DriveHealth("nvme", wear)
    eventually(lambda: health(tmp_path, tmp_path / "sys", tmp_path) == expected, "it has answered")


def test_a_drive_that_does_not_answer_keeps_no_heartbeat_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each heartbeat asks, with the agent's lock held; a host waits three seconds for its answer."""
    place(tmp_path / "sys", tmp_path, "virtual/nvme-subsystem/nvme-subsys0/nvme0n1/nvme0n1p2")
    answers, asked = threading.Event(), list[Path]()

    def ask(path: Path) -> DriveHealth:
        asked.append(path)
        assert answers.wait(20)
        return DriveHealth("nvme", 0.4)

    monkeypatch.setattr(drive, "_of_nvme", ask)
    for _ in range(3):
        assert health(tmp_path, tmp_path / "sys", tmp_path) == DriveHealth("nvme")
    answers.set()
    eventually(lambda: health(tmp_path, tmp_path / "sys", tmp_path).wear == 0.4, "it has answered")
    assert asked == [tmp_path / "ng0n1"]
