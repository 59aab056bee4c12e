# SPDX-License-Identifier: Apache-2.0
"""Edge (sysfs, ioctl): the health of the drive below the flash.

Wear of eMMC and UFS is in sysfs. That of NVMe is in the drive's SMART log, which a command of the drive's
administrator reads. A drive that is about to fail may not answer for seconds, and no signal ends the wait. So
a thread asks it, once a minute, and what it has answered last is told meanwhile: the host takes an agent that
is silent for so long for lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from pathlib import Path

from millpond.agent.health import smart
from millpond.base.errors import ConnectionLost
from millpond.tunnel.transports.nvme.ioctl import NvmeDevice, VendorCommand
from millpond.wire.control_messages import DriveHealth

_LIFE_STEP = 0.1
_ASKED_EACH, _PATIENCE = 60.0, 0.1
"""Seconds between two questions to an NVMe drive, and those in which most drives have answered."""
_NEARLY_USED = {2: "its spare blocks run out", 3: "its spare blocks are used up"}


def health(flash: Path, sysfs: Path = Path("/sys"), devices: Path = Path("/dev")) -> DriveHealth:
    """Return the health of the drive that a folder lies on. ``devices`` has the drives' device files."""
    with contextlib.suppress(OSError, ValueError):
        number = flash.stat().st_dev
        block = (sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
        for place in (block, *block.parents):
            if found := _of_emmc(place / "device") or _of_ufs(place / "health_descriptor"):
                return found
            if namespace := re.fullmatch(r"nvme(\d+n\d+)", place.name):
                path = devices / f"ng{namespace[1]}"
                return _NVME.setdefault(path, _NvmeHealth(path)).known()
    return DriveHealth("unknown")


def _of_emmc(device: Path) -> DriveHealth | None:
    try:
        used = [int(word, 16) for word in (device / "life_time").read_text().split()]
        spare = int((device / "pre_eol_info").read_text(), 16)
    except FileNotFoundError:
        return None
    return DriveHealth("emmc", _wear(used), _NEARLY_USED.get(spare, ""))


def _of_ufs(folder: Path) -> DriveHealth | None:
    try:
        used = [int((folder / f"life_time_estimation_{part}").read_text(), 16) for part in "ab"]
        spare = int((folder / "eol_info").read_text(), 16)
    except FileNotFoundError:
        return None
    return DriveHealth("ufs", _wear(used), _NEARLY_USED.get(spare, ""))


class _NvmeHealth:
    """Knows what an NVMe drive has answered last."""

    def __init__(self, path: Path) -> None:
        self._path, self._known, self._due = path, DriveHealth("nvme"), 0.0
        self._lock, self._thread = threading.Lock(), threading.Thread(target=self._ask)

    def known(self) -> DriveHealth:
        """Return it; ask the drive again if that is due."""
        with self._lock:
            if time.monotonic() >= self._due and not self._thread.is_alive():
                self._due = time.monotonic() + _ASKED_EACH
                self._thread = threading.Thread(target=self._ask, name="drive", daemon=True)
                self._thread.start()
            self._thread.join(_PATIENCE)
        return self._known

    def _ask(self) -> None:
        self._known = _of_nvme(self._path)


_NVME = dict[Path, _NvmeHealth]()


def _of_nvme(path: Path) -> DriveHealth:
    """Ask a drive by the generic device file of a namespace; without an answer its wear is not known."""
    try:
        with contextlib.closing(NvmeDevice(path)) as device:
            log = device.buffer(smart.SIZE)
            read = VendorCommand(smart.GET_LOG_PAGE, log, smart.SELECTOR)
            status, _ = device.admin(read, smart.WHOLE_DRIVE)
    except ConnectionLost:
        return DriveHealth("nvme")
    return DriveHealth("nvme") if status else smart.parsed(bytes(log))


def _wear(steps: list[int]) -> float | None:
    """Return the share of its life that a drive has used, None where it does not tell it. Its steps are
    tenths; what is beyond its life is 11.
    """
    return max(steps) * _LIFE_STEP if any(steps) else None
