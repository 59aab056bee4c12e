# SPDX-License-Identifier: Apache-2.0
"""Entry: ``python -m millpond.images.ondevice.volume_partition``: finds the volume's partition before it is
mounted, on boards where it is not on the disk that was booted.

The device's identity names the disk. A partition of our type there is the volume. A blank disk gets one,
once; what another has written is never formatted, unless the identity says that it may be lost. The partition
is recorded in the state: from then on the device takes this one alone, and makes no other, so that a missing
disk is no reason to begin with an empty volume.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millpond.base import toml
from millpond.base.errors import ConfigError, LocalError
from millpond.images.format import volume_disk
from millpond.images.format.volume_disk import VolumeDisk
from millpond.images.ondevice import boot_entries, gpt
from millpond.linux.files import write_durably

IDENTITY = Path("/var/lib/millpond-identity")
RECORD = Path("/var/lib/millpond-volume.toml")
RULE = Path("/run/udev/rules.d/62-millpond-volume.rules")
DEFINITIONS = Path("/usr/lib/millpond/volume-disk")
TYPE, NAME = "6d696c6c-706f-4e64-8000-f1a540000001", "flash"
_PATIENCE_SECONDS, _TOOL_SECONDS = 120.0, 600.0
_EDGE, _SAMPLE, _SAMPLES = 4 << 20, 4096, 256
_NOTHING_FOUND = 2
_WIPED = 1 << 20
_AGAIN = (
    "'millpond flash ... --volume-disk {disk} --erase-volume' gives it to the volume, what it holds is lost"
)


@dataclass(frozen=True, slots=True)
class VolumeRecord:
    """The volume of this device: its disk, and the GUID of its partition; "" while that is being made."""

    disk: str
    partition: str


def settle(wanted: VolumeDisk, disk: Path, record: Path, make: Callable[[Path], None]) -> str:
    """Return the GUID of the volume's partition on ``disk``, which ``make`` makes where it may be. Raises
    LocalError where the disk holds something else, or another volume than in the ``record``; OSError.
    """
    known = toml.read(VolumeRecord, record) if record.exists() else None
    found = volumes(disk)
    if known and known.partition:
        if known.partition not in found:
            raise LocalError(
                f"{wanted.disk} does not hold this device's volume, the partition {known.partition}: "
                "put its disk back, or flash the device anew"
            )
        return known.partition
    begun = known == VolumeRecord(wanted.disk, "")  # the making of the partition was cut
    if begun or wanted.erase or not found:
        if not begun:
            _require_usable(wanted, disk)
        _write(record, VolumeRecord(wanted.disk, ""))
        wipe(disk)
        make(disk)
        found = volumes(disk)
    if len(found) != 1:
        raise LocalError(f"{wanted.disk} holds {len(found)} volumes: {_AGAIN.format(disk=wanted.disk)}")
    _write(record, VolumeRecord(wanted.disk, found[0]))
    return found[0]


def volumes(disk: Path) -> list[str]:
    """Return the GUIDs of a disk's partitions that are volumes. Raises OSError."""
    return [one.guid for one in gpt.partitions(disk) if (one.type, one.name) == (TYPE, NAME)]


def _require_usable(wanted: VolumeDisk, disk: Path) -> None:
    """Raise LocalError if a disk holds what another has written, and nobody has said that it may be lost."""
    if not wanted.erase and (held := contents(disk)):
        again = _AGAIN.format(disk=wanted.disk)
        raise LocalError(f"{wanted.disk} holds {held} and is left as it is: {again}")


def contents(disk: Path) -> str:
    """Return what a disk holds: what blkid recognizes, or any byte in its ends and in samples between; "" for
    a blank one. Raises LocalError, OSError.
    """
    done = _tool("/sbin/blkid", "-p", "-o", "export", str(disk))
    if done.returncode != _NOTHING_FOUND:
        told = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
        return told.get("TYPE") or told.get("PTTYPE") or "what blkid cannot tell"
    with disk.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        places = [*range(0, min(_EDGE, size), _SAMPLE), *range(max(0, size - _EDGE), size, _SAMPLE)]
        places += [size * number // _SAMPLES // _SAMPLE * _SAMPLE for number in range(_SAMPLES)]
        for place in places:
            file.seek(place)
            data = file.read(_SAMPLE)
            if data.strip(b"\0") and data.strip(b"\xff"):
                return f"data of an unknown kind at byte {place}"
    return ""


def wipe(disk: Path) -> None:
    """Write zeros over both ends of a disk, where signatures and tables are. Raises OSError."""
    with disk.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for place in (0, max(0, size - _WIPED)):
            file.seek(place)
            file.write(bytes(min(_WIPED, size)))
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, record: VolumeRecord) -> None:
    text = f'disk = "{record.disk}"\npartition = "{record.partition}"\n'
    write_durably(path, text.encode())


def make_partition(disk: Path, definitions: Path = DEFINITIONS) -> None:
    """Make a table with one partition and its file system. Raises LocalError."""
    options = ["--dry-run=no", "--empty=force", "--seed=random", f"--definitions={definitions}"]
    done = _tool("/usr/bin/systemd-repart", *options, str(disk))
    if done.returncode:
        raise LocalError(f"no partition can be made on {disk}: {done.stderr.strip()[-300:]}")


def _tool(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_TOOL_SECONDS)
    except subprocess.TimeoutExpired:
        raise LocalError(f"{argv[0]} did not end in {_TOOL_SECONDS:.0f} s") from None


def find(wanted: VolumeDisk, seconds: float) -> Path:
    """Wait for the disk and return its node. Raises LocalError if it does not come or is the booted one."""
    path, end = Path(wanted.disk), time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            there = sorted(one.name for one in path.parent.glob("*") if "-part" not in one.name)
            raise LocalError(
                f"there is no {path}, the volume's disk; there are: {', '.join(there) or 'none'}"
            )
        time.sleep(0.2)
    disk = path.resolve()
    if not disk.is_block_device() or str(disk) == boot_entries.boot_disk():
        raise LocalError(f"{path} is {disk}, which is the disk that was booted, or none at all")
    return disk


def announce(guid: str, disk: Path) -> None:
    """Have udev name the partition /dev/millpond/flash. Raises OSError, CalledProcessError."""
    rule = f'SUBSYSTEM=="block", ENV{{DEVTYPE}}=="partition", KERNELS=="{disk.name}", '
    rule += f'ENV{{ID_PART_ENTRY_UUID}}=="{guid}", SYMLINK+="millpond/flash"\n'
    RULE.parent.mkdir(parents=True, exist_ok=True)
    RULE.write_text(rule)
    for words in (["control", "--reload"], ["trigger", "--settle", "--subsystem-match=block"]):
        subprocess.run(["/usr/bin/udevadm", *words], check=True, timeout=_TOOL_SECONDS)


def main() -> int:
    """Find or make the volume's partition. Exit codes: 0 it is there, 1 it is not."""
    try:
        if not (IDENTITY / volume_disk.FILE).exists():
            raise LocalError(
                "nothing names its disk: flash the device with --volume-disk /dev/disk/by-id/..."
            )
        wanted = volume_disk.read(IDENTITY)
        disk = find(wanted, _PATIENCE_SECONDS)
        guid = settle(wanted, disk, RECORD, make_partition)
        announce(guid, disk)
    except (LocalError, ConfigError, OSError, subprocess.SubprocessError) as error:
        print(f"millpond: no volume: {error}", flush=True)
        return 1
    print(f"millpond: the volume is the partition {guid} of {wanted.disk}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
