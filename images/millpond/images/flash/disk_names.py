# SPDX-License-Identifier: Apache-2.0
"""Edge (/sys): what tells a disk from others of its model: serial number, WWN, slot."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from millpond.base.text import printable
from millpond.images.flash import disk_inventory

_PROOF = 4  # characters that are typed
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SERIALS = ("serial", "device/serial", "device/vpd_pg80")
_WWNS = ("wwid", "device/wwid")


@dataclass(frozen=True, slots=True)
class DiskNames:
    """The names of a disk, "" for those it lacks. ``slot`` is a place on the bus or in an enclosure."""

    serial: str
    wwn: str
    slot: str

    def described(self) -> tuple[str, ...]:
        """Return each name with what it is."""
        named = (("serial", self.serial), ("WWN", self.wwn), ("slot", self.slot))
        return tuple(f"{kind} {name}" for kind, name in named if name)

    @property
    def proof(self) -> str:
        """The end of the serial number, or else of the WWN, which a user types who means this disk."""
        return (self.serial or self.wwn)[-_PROOF:]


def names(disk: Path) -> DiskNames:
    """Return the names of a disk by its folder in sysfs."""
    return DiskNames(_first(disk, _SERIALS), _first(disk, _WWNS), _slot(disk))


def alike(disk: Path) -> int:
    """Return how many disks have this disk's model and size, itself included."""
    return 1 + sum(_kind(other) == _kind(disk) for other in _others(disk))


def _kind(disk: Path) -> tuple[str, str]:
    return disk_inventory.model(disk), _text(disk / "size")


def _others(disk: Path) -> list[Path]:
    """Return the other disks on hardware: a loop device or a mapping has no ``device``."""
    if not (disk / "device").exists():
        return []
    listed = (entry.resolve() for entry in _class_block(disk).iterdir())
    return [other for other in listed if other != disk and (other / "device").exists()]


def _class_block(disk: Path) -> Path:
    return next(parent for parent in disk.parents if parent.name == "sys") / "class" / "block"


def _slot(disk: Path) -> str:
    for parent in (disk, *disk.parents):
        if slot := next((_text(link / "slot") for link in parent.glob("enclosure_device:*")), ""):
            return f"enclosure {slot}"
    if not (found := _PCI.findall(str(disk))):
        return ""
    return f"{found[-1]} {scsi[0]}" if (scsi := re.findall(r"/(\d+:\d+:\d+:\d+)/", str(disk))) else found[-1]


def _first(disk: Path, places: tuple[str, ...]) -> str:
    return next(filter(None, (_text(disk / place) for place in places)), "")


def _text(path: Path) -> str:
    """Return the text of an attribute; the serial number's page of SCSI has four bytes before it."""
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    return printable(data[4 if path.name == "vpd_pg80" else 0 :].decode(errors="replace").strip("\0 \n"))
