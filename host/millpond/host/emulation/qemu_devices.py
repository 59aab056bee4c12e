# SPDX-License-Identifier: Apache-2.0
"""Edge: devices in QEMU: each has a disk of its own, flashed from an image with its identity."""

from __future__ import annotations

from pathlib import Path

from millpond.base.errors import LocalError
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import DeviceConfig, Fleet
from millpond.images import boards
from millpond.images.flash.open_target import opened
from millpond.images.flash.writer import flash
from millpond.images.format import locate, seed, volume_disk
from millpond.images.format.manifest import Manifest
from millpond.images.runtime.qemu import DISK, flash_name, refusal_reason


def ensure(fleet: Fleet, count: int, image: Path) -> Fleet:
    """Return the fleet with ``qemu0`` and so on, ``count`` of them, each with a disk; existing disks stay as
    they are. Raises LocalError without QEMU, or without an image where one is needed.
    """
    if count and (reason := refusal_reason()):
        raise LocalError(reason)
    for name in (f"qemu{number}" for number in range(count)):
        known = {device.name: device.board for device in fleet.config.device}
        if name in known and (fleet.device_directory(name) / DISK).exists():
            continue
        path, manifest = _find(image)
        _hardware(manifest.board)  # before anything is made
        if name not in known:
            fleet = provisioning.add(fleet, DeviceConfig(name, board=manifest.board))
        elif known[name] != manifest.board:
            raise LocalError(f"the board of {name} is {known[name]}, the image is for {manifest.board}")
        make_disk(path, manifest, fleet.device_directory(name))
    return fleet


def _hardware(board: str) -> boards.QemuHardware:
    hardware = boards.read(board).qemu
    if hardware is None:
        raise LocalError(f"a {board} cannot be run in QEMU")
    return hardware


def _find(image: Path) -> tuple[Path, Manifest]:
    if not image.exists():
        raise LocalError(f"{image}: no such image: make it with 'make image', or name one with --image")
    return locate.find(image)


def make_disk(image: Path, manifest: Manifest, directory: Path) -> None:
    """Write the disk of the device in ``directory``, whole or not at all. Raises LocalError, RemoteError."""
    hardware = _hardware(manifest.board)
    new = directory / f"{DISK}.new"
    new.unlink(missing_ok=True)
    size = max(hardware.disk << 20, manifest.image.bytes)
    with opened(str(new), least=manifest.image.bytes, size=size, secret=True) as medium:
        flash(image, manifest, medium, _seed(directory, manifest), lambda _phase, _more: None)
    new.replace(directory / DISK)


def _seed(directory: Path, manifest: Manifest) -> bytes:
    """Return the seed of the device in ``directory``, whose volume is QEMU's second disk."""
    more = {}
    if boards.read(manifest.board).flash.disk == "own":
        disk = volume_disk.VolumeDisk(flash_name(directory.name))
        more[volume_disk.FILE] = volume_disk.dumps(disk).encode()
    return seed.seed(directory / "etc", more)
