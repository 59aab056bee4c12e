# SPDX-License-Identifier: Apache-2.0
"""Entry: a device takes over its identity: ``python -m millpond.images.ondevice.provision``, at every boot.

Whoever flashed the image left the identity in the partition ``seed``. It is written whole to the state,
then the seed is wiped, so that a second boot finds nothing. A cut in between leaves the seed, and it is done
again. What is wrong with a seed does not matter to a device that has its identity.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import tomllib
from pathlib import Path
from typing import BinaryIO

from millpond.base.errors import LocalError
from millpond.images.format import seed as seeds
from millpond.images.format.seed import Member
from millpond.linux.files import sync_folder

SEED = Path("/dev/disk/by-partlabel/seed")
IDENTITY = Path("/var/lib/millpond-identity")
HOST_NAME = Path("/proc/sys/kernel/hostname")
SEED_SECONDS = 20.0
"""How long udev may take to name the partition."""


def take_over(seed: Path, identity: Path) -> bool:
    """Move what ``seed`` holds to ``identity``, whole or not at all; whether it held anything. Raises
    LocalError for a damaged seed, OSError.
    """
    with seed.open("r+b") as file:
        members = seeds.read(file)
        if members:
            _write(members, identity)
            # Before the rest: a header with half of what it tells of would be a damaged seed.
            _put(file, 0, seeds.WIPED)
        _finish_wiping(file)
    return bool(members)


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
    new, old = identity.with_suffix(".new"), identity.with_suffix(".old")
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)
    new.mkdir(mode=0o755, parents=True)
    for member in members:
        _write_member(new / member.name, member)
    sync_folder(new)
    if identity.exists():
        identity.rename(old)
    new.rename(identity)
    sync_folder(identity.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_member(path: Path, member: Member) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, member.mode)  # whatever the umask
        file.write(member.data)
        file.flush()
        os.fsync(descriptor)


def refresh(seed: Path, identity: Path, patience: float) -> str:
    """Take over what there is to take over; the device's name. Raises LocalError, OSError, KeyError or
    ValueError if it has none.
    """
    known = (identity / "agent.toml").exists()
    end = time.monotonic() + (0 if known else patience)
    while not seed.exists() and time.monotonic() < end:
        time.sleep(0.1)
    try:
        if take_over(seed, identity):
            print("millpond: the identity was taken from the seed", flush=True)
    except (LocalError, OSError) as error:
        if not (identity / "agent.toml").exists():
            raise
        print(f"millpond: the identity stays as it is, for there is no seed to read: {error}", flush=True)
    return _name(identity)


def _name(identity: Path) -> str:
    with (identity / "agent.toml").open("rb") as file:
        return str(tomllib.load(file)["name"])


def main() -> int:
    """Take over an identity if there is one. Exit codes: 0 the device has an identity, 1 it has none."""
    try:
        name = refresh(SEED, IDENTITY, SEED_SECONDS)
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
