# SPDX-License-Identifier: Apache-2.0
"""Edge (disks, files): opens what an image is to be written to, unless something speaks against it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.flash import disk_inventory, disk_names
from millpond.images.flash.block_device import BlockMedium, FileMedium, TargetDescription


@contextlib.contextmanager
def opened(
    target: str, *, least: int, size: int | None = None, secret: bool = False
) -> Iterator[BlockMedium]:
    """Open a target for this process alone after all checks; a missing file is created, nothing else changes.

    The target must have ``least`` bytes; a file becomes ``size`` long or, without it, as long as that.
    With ``secret`` only its owner may read a file. Raises LocalError that says which check failed,
    OSError.
    """
    found = _stat(target)
    if found and stat.S_ISBLK(found.st_mode):
        if size is not None:
            raise LocalError(f"{target} is a disk and has the size it has: leave out --size")
        medium = _block_device(target, found)
    else:
        _check_size(target, least if size is None else size, least)
        medium = _file(target, found, size or least, secret=secret)
    with contextlib.closing(medium):
        _check_size(target, medium.size, least)
        yield medium


def _check_size(target: str, size: int, least: int) -> None:
    if size < least:
        raise LocalError(f"{target} is too small: it has {size} bytes, a device needs {least}")


def _stat(target: str) -> os.stat_result | None:
    try:
        return Path(target).stat()
    except FileNotFoundError:
        return None


def _block_device(target: str, found: os.stat_result) -> BlockMedium:
    machine = disk_inventory.DiskInventory()
    disk = machine.node(found.st_rdev)
    if disk is None:
        raise LocalError(f"{target} belongs to no disk that this machine has")
    if reason := machine.refusal_reason(disk):
        raise LocalError(f"{target} {reason}")
    descriptor = _exclusive(target)
    if os.fstat(descriptor).st_rdev != found.st_rdev:
        os.close(descriptor)
        raise LocalError(f"{target} has just become another disk: try again")
    length = os.lseek(descriptor, 0, os.SEEK_END)
    own = disk_names.names(disk)
    about = TargetDescription(
        length,
        disk_inventory.model(disk),
        tuple(disk_inventory.contents(disk)),
        names=own.described(),
        proof=own.proof,
        alike=disk_names.alike(disk),
    )
    return BlockMedium(Path(target), descriptor, about)


def _exclusive(target: str) -> int:
    """Open a block device with O_EXCL, so that the kernel refuses to mount it or make it part of anything."""
    try:
        return os.open(target, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise LocalError(f"{target} is in use: another program has it for itself") from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise LocalError(f"{target}: {error.strerror}: writing to a disk takes root") from None
        raise


def _file(target: str, found: os.stat_result | None, size: int, *, secret: bool) -> BlockMedium:
    if found is None:
        _check_new(target)
    elif not stat.S_ISREG(found.st_mode):
        raise LocalError(f"{target} is neither a disk nor a file")
    elif _in_dev(target):
        raise LocalError(f"{target} is a file, not a disk, though it lies in /dev: remove it first")
    elif reason := disk_inventory.DiskInventory().file_use(Path(target).resolve()):
        raise LocalError(f"{target} {reason}")
    flags = os.O_RDWR | os.O_CLOEXEC | (0 if found else os.O_CREAT | os.O_EXCL)
    descriptor = os.open(target, flags, 0o600 if secret else 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # QEMU has locks on the disks of its machines
    except BlockingIOError:
        os.close(descriptor)
        raise LocalError(f"{target} is in use by another program, such as a virtual machine") from None
    return FileMedium(Path(target), descriptor, TargetDescription(size, new=found is None), secret=secret)


def _check_new(target: str) -> None:
    if _in_dev(target):
        raise LocalError(f"{target}: there is no such disk; 'lsblk' lists those that there are")
    disk = Path("/dev", target)
    if "/" not in target and disk.is_block_device():
        raise LocalError(f"{target} would be a file: write {disk} for the disk, ./{target} for a file")


def _in_dev(target: str) -> bool:
    """Return whether a file would be created in /dev, in memory, by mistake."""
    return Path(target).resolve().parent.stat().st_dev == Path("/dev").stat().st_dev
