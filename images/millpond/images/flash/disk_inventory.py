# SPDX-License-Identifier: Apache-2.0
"""Edge (/sys, /proc, blkid): the disks of this machine: what they are, what is on them and who uses them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_SYSTEM = frozenset({"/", "/boot", "/boot/efi", "/boot/firmware", "/efi", "/usr"})
_BLKID_SECONDS = 10.0
_DEEPEST = 16


class DiskInventory:
    """The disks that the kernel lists below ``root``, which is a made-up tree in tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._sys, self._proc = root, root / "sys", root / "proc"

    def node(self, number: int) -> Path | None:
        """Return the sysfs folder of the block device with this ``st_rdev``."""
        return self._numbered(f"{os.major(number)}:{os.minor(number)}")

    def refusal_reason(self, disk: Path) -> str | None:
        """Return why a disk must not be written, as text to follow its name; None if it may be."""
        if (disk / "partition").exists():
            return f"is a partition: an image is for a whole disk, such as {disk.parent.name}"
        if _text(disk / "ro") == "1":
            return "is write-protected"
        if (sector := _text(disk / "queue" / "logical_block_size")) not in ("", "512"):
            return f"has sectors of {sector} bytes; the image's partition table is for 512"
        if mountpoint := self._system(disk):
            return f"is the disk that this system runs from ({mountpoint} is on it)"
        return self._use(disk)

    def _system(self, disk: Path) -> str:
        for mountpoint, nodes in self._mounts():
            if mountpoint in _SYSTEM and any(disk in self._below(node) for node in nodes):
                return mountpoint
        return ""

    def _use(self, disk: Path) -> str | None:
        parts = _with_partitions(disk)
        for mountpoint, nodes in self._mounts():
            for node in parts:
                if node in nodes:
                    return f"is in use: {node.name} is mounted at {mountpoint}; 'umount' it first"
        swaps = list(self._swaps())
        for node in parts:
            if node in swaps:
                return f"is in use: {node.name} is swap space; 'swapoff' it first"
            if holders := sorted(entry.name for entry in _entries(node / "holders")):
                return f"is in use: {node.name} is part of {', '.join(holders)} (LVM, RAID or encryption)"
        return None

    def file_use(self, path: Path) -> str | None:
        """Return why a file must not be written, as text to follow its name; None if it may be."""
        for backing in (self._sys / "block").glob("loop*/loop/backing_file"):
            if _text(backing) == str(path):
                return f"is in use: it is the disk {backing.parent.parent.name}; 'losetup -d' it first"
        if str(path) in self._swap_names():
            return "is in use: it is swap space; 'swapoff' it first"
        return None

    def _below(self, node: Path, depth: int = 0) -> set[Path]:
        """Return a block device and all that it lies on: its disk, LVM or RAID members, a loop's file."""
        found = {node}
        if depth == _DEEPEST:
            return found
        below = [entry.resolve() for entry in _entries(node / "slaves")]
        if (node / "partition").exists():
            below.append(node.parent)
        if file := _text(node / "loop" / "backing_file"):
            below += filter(None, [self._of_file(Path(file))])
        return found.union(*(self._below(one, depth + 1) for one in below))

    def _of_file(self, path: Path) -> Path | None:
        try:
            return self.node(path.stat().st_dev)
        except OSError:
            return None

    def _mounts(self) -> Iterator[tuple[str, set[Path]]]:
        """Yield each mount point with the block devices under it."""
        for line in (self._proc / "self" / "mountinfo").read_text(errors="replace").splitlines():
            fields = line.split(" ")
            source = fields[fields.index("-") + 2]
            # Some file systems, such as btrfs, have a number that is no device's; then the source tells.
            nodes = {self._numbered(fields[2]), self._named(source)}
            yield _unescaped(fields[4]), {node for node in nodes if node}

    def _swaps(self) -> Iterator[Path]:
        for name in self._swap_names():
            if node := self._named(name):
                yield node

    def _swap_names(self) -> list[str]:
        lines = _text(self._proc / "swaps").splitlines()[1:]
        return [_unescaped(line.split()[0]) for line in lines if line.strip()]

    def _numbered(self, number: str) -> Path | None:
        path = self._sys / "dev" / "block" / number
        return path.resolve() if path.exists() else None

    def _named(self, source: str) -> Path | None:
        """Return the block device of a mount's source: ``/dev/sda2``, or a link to it as LVM has."""
        if not source.startswith("/dev/"):
            return None
        path = self._sys / "class" / "block" / (self._root / source[1:]).resolve().name
        return path.resolve() if path.exists() else None


def model(disk: Path) -> str:
    """Return a disk's vendor and model; "" if it has none."""
    if file := _text(disk / "loop" / "backing_file"):
        return f"loop device of {file}"
    names = [_text(disk / "device" / name) for name in ("vendor", "model", "name")]
    known = [name for name in names if name and not name.startswith("0x")]  # a vendor of virtio is a number
    return " ".join(known) or disk.name


def contents(disk: Path, directory: Path = Path("/dev")) -> list[str]:
    """Return the names and kinds of the file systems on a disk and its partitions, as far as blkid knows."""
    told = []
    for node in _with_partitions(disk):
        found = _probe(directory / node.name.replace("!", "/"))
        name = found.get("LABEL") or found.get("PART_ENTRY_NAME") or _partition_name(node)
        kind = found.get("TYPE") or found.get("PTTYPE", "")
        if node != disk:
            told.append(f"{name or node.name}{f' ({kind})' if kind else ''}")
        elif name or kind:
            told.append(f"{name} ({kind})" if name else kind)
    return told


def _probe(path: Path) -> dict[str, str]:
    blkid = shutil.which("blkid", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")  # `su` has no sbin
    if not blkid:
        return {"TYPE": "unknown: there is no blkid"}
    argv = [blkid, "--probe", "--output", "export", str(path)]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_BLKID_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):  # a disk that does not answer
        return {}
    lines = (line.partition("=") for line in done.stdout.decode(errors="replace").splitlines())
    return {key: value for key, _, value in lines}


def _partition_name(node: Path) -> str:
    match = re.search(r"^PARTNAME=(.*)$", _text(node / "uevent"), re.MULTILINE)
    return match[1] if match else ""


def _with_partitions(disk: Path) -> list[Path]:
    return [disk, *sorted(path.parent for path in disk.glob("*/partition"))]


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _unescaped(name: str) -> str:
    """Decode the octal escapes of /proc/mounts."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)
