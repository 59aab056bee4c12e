# SPDX-License-Identifier: Apache-2.0
"""Edge (sysfs): the health of the drive below the flash, as far as the kernel tells it to everybody.

Wear of eMMC and UFS is in sysfs. That of NVMe takes a command of the drive's administrator, which the agent's
unit does not allow.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from millpond.wire.control_messages import DriveHealth

_LIFE_STEP = 0.1
_NEARLY_USED = {2: "its spare blocks run out", 3: "its spare blocks are used up"}


def health(flash: Path, sysfs: Path = Path("/sys")) -> DriveHealth:
    """Return the health of the drive that a folder lies on."""
    with contextlib.suppress(OSError, ValueError):
        number = flash.stat().st_dev
        block = (sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
        for place in (block, *block.parents):
            if found := _of_emmc(place / "device") or _of_ufs(place / "health_descriptor"):
                return found
            if place.name.startswith("nvme"):
                return DriveHealth("nvme")
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


def _wear(steps: list[int]) -> float | None:
    """Return the share of its life that a drive has used, None where it does not tell it. Its steps are
    tenths; what is beyond its life is 11.
    """
    return max(steps) * _LIFE_STEP if any(steps) else None
