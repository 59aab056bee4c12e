# SPDX-License-Identifier: Apache-2.0
"""Entry: a device takes over its identity: ``python -m millpond.images.ondevice.provision``, at every boot.

The flasher left the identity in the partition ``seed`` of the disk that is booted. It is written whole to the
state, then the seed is wiped. A cut in between leaves the seed, and the next boot does it again. A seed on
another disk counts for nothing, and neither does one of another identity on a device that has one: its flash
holds private data under the keys of its fleet. To give a device another identity, flash it again.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path
from typing import BinaryIO

from millpond.base.errors import LocalError
from millpond.images.format import seed as seeds
from millpond.images.format.seed import Member
from millpond.linux.files import sync_folder

SEED_NAME = "seed"
ROOT = Path("/")
SYS = Path("/sys")
IDENTITY = Path("/var/lib/millpond-identity")
HOST_NAME = Path("/proc/sys/kernel/hostname")


def seed_partition(device: int, sys_root: Path = SYS) -> Path | None:
    """Return the partition ``seed`` of the disk on which the root, a file system with this ``st_dev``, lies:
    in a partition, or verified (dm-verity) in one. None if that disk has no seed.
    """
    node = (sys_root / "dev/block" / f"{os.major(device)}:{os.minor(device)}").resolve()
    node = next((below.resolve() for below in node.glob("slaves/*")), node)
    if not (node / "partition").exists():
        return None
    for uevent in node.parent.glob("*/uevent"):
        told = dict(line.partition("=")[::2] for line in uevent.read_text(errors="replace").splitlines())
        if told.get("PARTNAME") == SEED_NAME:
            return Path("/dev", told["DEVNAME"])
    return None


def take_over(seed: Path, identity: Path) -> bool:
    """Move what ``seed`` holds to ``identity``, whole or not at all; return whether it held anything. Raises
    LocalError for a damaged seed, and for one of another identity than the device has; OSError.
    """
    with seed.open("r+b") as file:
        members = seeds.read(file)
        if members:
            if not _has_identity(identity):
                _write(members, identity)
            elif not _is_of(members, identity):
                raise LocalError(f"the device has an identity, and the one in {seed} is another")
            # Before the rest: a header with half of what it tells of would be a damaged seed.
            _put(file, 0, seeds.WIPED)
        _finish_wiping(file)
    return bool(members)


def _has_identity(identity: Path) -> bool:
    return (identity / "agent.toml").exists()


def _is_of(members: tuple[Member, ...], identity: Path) -> bool:
    """Return whether a seed holds the present identity: its wiping was cut."""
    try:
        return all((identity / member.name).read_bytes() == member.data for member in members)
    except FileNotFoundError:
        return False


def _finish_wiping(file: BinaryIO) -> None:
    """Wipe a seed whose identity was taken, also one whose wiping was cut."""
    file.seek(0)
    header, rest = file.read(seeds.HEADER), file.read(seeds.MAX_TAR)
    if header == seeds.WIPED and rest.strip(b"\0"):
        _put(file, seeds.HEADER, bytes(len(rest)))


def _put(file: BinaryIO, offset: int, data: bytes) -> None:
    file.seek(offset)
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _write(members: tuple[Member, ...], identity: Path) -> None:
    new = identity.with_suffix(".new")
    for path in (new, identity):  # what is there is no identity
        shutil.rmtree(path, ignore_errors=True)
    new.mkdir(mode=0o755, parents=True)
    for member in members:
        _write_member(new / member.name, member)
    sync_folder(new)
    new.rename(identity)
    sync_folder(identity.parent)


def _write_member(path: Path, member: Member) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, member.mode)  # whatever the umask
        file.write(member.data)
        file.flush()
        os.fsync(descriptor)


def refresh(seed: Path | None, identity: Path) -> str:
    """Take over what there is to take over; return the device's name. Raises LocalError, OSError, KeyError or
    ValueError if it has none.
    """
    try:
        if seed and take_over(seed, identity):
            print("millpond: the identity was taken from the seed", flush=True)
    except (LocalError, OSError) as error:
        if not _has_identity(identity):
            raise
        print(f"millpond: the identity stays as it is: {error}", flush=True)
    return _name(identity)


def _name(identity: Path) -> str:
    with (identity / "agent.toml").open("rb") as file:
        return str(tomllib.load(file)["name"])


def main() -> int:
    """Take over an identity if there is one. Exit codes: 0 the device has an identity, 1 it has none."""
    try:
        name = refresh(seed_partition(ROOT.stat().st_dev, SYS), IDENTITY)
        HOST_NAME.write_text(name)
    except FileNotFoundError as error:
        print(
            f"millpond: this device has no identity ({error.filename}): flash it with --device NAME",
            flush=True,
        )
        return 1
    except (LocalError, OSError, KeyError, ValueError) as error:
        print(f"millpond: this device cannot take over its identity: {error}", flush=True)
        return 1
    print(f"millpond: this device is {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
