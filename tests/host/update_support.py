# SPDX-License-Identifier: Apache-2.0
"""An image of two files, and fleets with devices of its board."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import DeviceConfig, Fleet
from millpond.images.format import locate
from millpond.images.format.manifest import ImageFile, Manifest, SeedPlace, dumps

MIB = 1 << 20


def make_image(folder: Path, board: str = "qemu-virt", serial: int = 1000) -> tuple[Path, Manifest]:
    """What the builder leaves; its disk has bytes in the place of a partition table."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"millpond-{board}.img"
    with path.open("wb") as file:
        file.truncate(8 * MIB)
        for offset in (0, 2 * MIB, 7 * MIB):
            file.seek(offset)
            file.write(os.urandom(8192))
    files = []
    for name in ("esp.vfat", "root.squashfs"):
        data = os.urandom(64 << 10)
        (folder / name).write_bytes(data)
        files.append(ImageFile(name, len(data), hashlib.sha256(data).hexdigest()))
    manifest = Manifest(
        name="millpond",
        version="0.1.0",
        serial=serial,
        board=board,
        architecture="aarch64",
        image=locate.describe(path),
        seed=SeedPlace(4 * MIB, MIB),
        files=tuple(files),
    )
    path.with_suffix(".json").write_text(dumps(manifest))
    return path, manifest


def make_fleet(directory: Path, *boards: str) -> Fleet:
    """Devices ``dev0`` and so on, one of each board."""
    fleet = provisioning.create(directory, "farm", ())
    for number, board in enumerate(boards):
        fleet = provisioning.add(fleet, DeviceConfig(f"dev{number}", board=board))
    return fleet
