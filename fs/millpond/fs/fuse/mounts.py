# SPDX-License-Identifier: Apache-2.0
"""Edge: checks mount points, and unmounts, also mounts of a dead or stuck server."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.linux import syscalls


def require_mountable(mountpoint: Path, name: str) -> None:
    """Raise LocalError, with the reason, if ``name`` cannot be mounted at ``mountpoint``."""
    if not name or any(character in ",\\\n" for character in name):
        raise LocalError(f"'{name}' cannot be the name of a mount")
    if os.geteuid() != 0:
        raise LocalError(f"{mountpoint}: mounting needs root, or root of a user namespace")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise LocalError("/dev/fuse is missing or closed to this user: load the fuse module, or pass it in")
    try:
        if any(mountpoint.iterdir()):
            raise LocalError(f"{mountpoint}: a mount point must be an empty directory")
    except OSError as error:
        raise LocalError(f"{mountpoint}: cannot be a mount point: {error.strerror}") from None


def unmount(mountpoint: Path) -> bool:
    """Unmount the top mount at ``mountpoint``, without waiting for its server. Returns whether there was one.

    Files open in it stay usable for as long as its server lives. Raises LocalError if it is not permitted.
    """
    try:
        syscalls.unmount(mountpoint)
    except OSError as error:
        if error.errno == errno.EINVAL:  # nothing is mounted there
            return False
        if error.errno != errno.EPERM:
            raise LocalError(f"{mountpoint}: cannot unmount: {error.strerror}") from None
        from millpond.fs.fuse.fusermount import unmount_by_helper  # lasting processes rarely need it

        unmount_by_helper(mountpoint)
    return True


def read_ahead(mountpoint: Path, size: int) -> bool:
    """Set the kernel's readahead for this mount to ``size`` bytes, instead of 128 KiB. Asks the kernel alone.

    Returns False if this user may not: it takes root of the whole machine.
    """
    try:
        device = _device_of(mountpoint)
        Path("/sys/class/bdi", device, "read_ahead_kb").write_text(f"{size >> 10}\n")
    except OSError:
        return False
    return True


def _device_of(mountpoint: Path) -> str:
    """Return the mount's device number as MAJOR:MINOR. Raises OSError."""
    place = os.open(mountpoint, os.O_PATH | os.O_CLOEXEC)
    try:
        info = Path(f"/proc/self/fdinfo/{place}").read_text()
    finally:
        os.close(place)
    number = info.partition("mnt_id:")[2].split()[0]
    mounts = (line.split(" ", 3) for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return next((device for mount, _, device, _ in mounts if mount == number), "")


def is_volume(mountpoint: Path) -> bool:
    """Return whether the top mount on ``mountpoint`` is a volume, also a dead one, but not one hidden below a
    later mount on a parent directory.

    Asks the kernel alone.
    """
    wanted = os.path.abspath(mountpoint)  # noqa: PTH100 - resolving would ask a server that may be dead
    found = False
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        place = before.split(" ")[4].encode().decode("unicode_escape")
        if place == wanted:
            found = after.split(" ")[0] == "fuse.millpond"
        elif wanted.startswith(place.rstrip("/") + "/"):
            found = False
    return found
