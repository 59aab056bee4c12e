# SPDX-License-Identifier: Apache-2.0
"""Edge: checks mount points, and unmounts, also mounts of a dead or stuck server."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import select
import threading
from collections.abc import Callable
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.linux import syscalls

_USED_MILLISECONDS = 1000
_DEAD_SECONDS, _HELPER_SECONDS = 2.0, 5.0
_MOST_LINKS = 40  # as the kernel's
_TABLE = Path("/proc/self/mountinfo")


def require_mountable(mountpoint: Path, name: str) -> None:
    """Raise LocalError, with the reason, if ``name`` cannot be mounted at ``mountpoint``."""
    if not name or any(character in ",\\\n" for character in name):
        raise LocalError(f"'{name}' cannot be the name of a mount")
    if os.geteuid() != 0:
        raise LocalError(f"{mountpoint}: mounting needs root, or root of a user namespace")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise LocalError("/dev/fuse is missing or closed to this user: load the fuse module, or pass it in")
    require_no_volume(mountpoint)
    try:
        if any(mountpoint.iterdir()):
            raise LocalError(f"{mountpoint}: a mount point must be an empty directory")
    except OSError as error:
        raise LocalError(f"{mountpoint}: cannot be a mount point: {error.strerror}") from None


def has_fuse_python() -> bool:
    """Return whether fuse-python is installed, which has no wheels for Python 3.13 and later ones."""
    return importlib.util.find_spec("fuse") is not None


def require_no_volume(mountpoint: Path) -> None:
    """Raise LocalError if a volume is mounted at ``mountpoint``, also a dead one. Asks the kernel alone."""
    kind, name = top_mount(mountpoint)
    if kind == "fuse.millpond":
        raise LocalError(f"{name} is already mounted at {mountpoint}")


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
        _unmount_by_helper(mountpoint)
    return True


def _unmount_by_helper(mountpoint: Path) -> None:
    """Unmount through fusermount, the set-uid helper of FUSE that lets users unmount their own mounts. Raises
    LocalError.
    """
    import shutil  # lasting processes rarely need these
    import subprocess

    helper = shutil.which("fusermount") or shutil.which("fusermount3")
    if helper is None:
        raise LocalError(f"{mountpoint}: cannot unmount: this user may not, and there is no fusermount")
    try:
        done = subprocess.run(
            [helper, "-u", "-z", mountpoint], capture_output=True, timeout=_HELPER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise LocalError(f"{mountpoint}: cannot unmount: fusermount hangs") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise LocalError(f"{mountpoint}: cannot unmount: {reason[-1]}")


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
    mounts = (line.split(" ", 3) for line in _lines())
    return next((device for mount, _, device, _ in mounts if mount == number), "")


def _lines() -> list[str]:
    """Return the mount table's lines; what is not UTF-8 in names of others stays as it is."""
    return [os.fsdecode(line) for line in _TABLE.read_bytes().split(b"\n") if line]


def place_of(mountpoint: Path) -> Path:
    """Return the path of a mount point as the kernel names it: absolute, without symbolic links and "..".
    Nothing is asked of what is mounted there, whose server may be dead.
    """
    found = mountpoint.absolute()
    for _ in range(_MOST_LINKS):
        if found.name == "..":
            return found.resolve()
        found = found.parent.resolve() / found.name
        try:
            found = found.parent / found.readlink()
        except OSError:  # no link, as a rule
            break
    return found


def unmount_dead(mountpoint: Path) -> bool:
    """Unmount a volume whose process has ended. Returns whether there was one."""
    was_dead = is_volume(mountpoint) and is_dead(mountpoint)
    if was_dead:
        unmount(mountpoint)
    return was_dead


def volumes() -> list[tuple[str, Path]]:
    """Return the names and places of all volumes that are mounted here. Asks the kernel alone."""
    found = []
    for line in _lines():
        before, _, after = line.partition(" - ")
        kind, source, *_ = after.split(" ")
        if kind == "fuse.millpond":
            found.append((_unescaped(source), Path(_unescaped(before.split(" ")[4]))))
    return found


def is_dead(mountpoint: Path) -> bool:
    """Return whether the process of the mount has ended: the kernel says so at once."""
    errors = list[int | None]()

    def ask() -> None:
        try:
            os.statvfs(mountpoint)  # attributes may be cached
        except OSError as error:
            errors.append(error.errno)

    thread = threading.Thread(target=ask, name="dead mount", daemon=True)
    thread.start()
    thread.join(_DEAD_SECONDS)
    return errno.ENOTCONN in errors


def is_volume(mountpoint: Path) -> bool:
    """Return whether the top mount on ``mountpoint`` is one of a volume's files, also a dead one. Asks the
    kernel alone.
    """
    return top_mount(mountpoint)[0] == "fuse.millpond"


def top_mount(mountpoint: Path) -> tuple[str, str]:
    """Return the type and the source of the top mount on ``mountpoint``, unless a later mount on a parent
    directory hides it; empty texts if there is none. Asks the kernel alone.
    """
    wanted = str(place_of(mountpoint))
    found = "", ""
    for line in _lines():
        before, _, after = line.partition(" - ")
        place = _unescaped(before.split(" ")[4])
        if place == wanted:
            kind, source, *_ = after.split(" ")
            found = kind, source
        elif wanted.startswith(place.rstrip("/") + "/"):
            found = "", ""
    return found


def _unescaped(text: str) -> str:
    """Return a name of the mount table, whose spaces and the like are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


class MountWatch:
    """Watches whether a mount is still in this process's mount namespace, in a thread. Other namespaces may
    keep copies of it after it was unmounted here: its server would never learn of that.

    ``is_used`` is asked once it is gone; when it returns False, ``end`` is called.
    """

    def __init__(self, mountpoint: Path, is_used: Callable[[], bool], end: Callable[[], None]) -> None:
        self._is_used, self._end = is_used, end
        self._device = _device_of(mountpoint)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="mount watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        with _TABLE.open("rb", buffering=0) as table:
            change = select.poll()
            change.register(table, select.POLLERR | select.POLLPRI)
            change.register(self._stop, select.POLLIN)
            wait = None
            while all(number != self._stop for number, _ in change.poll(wait)):
                table.seek(0)
                if any(line.split()[2].decode() == self._device for line in table.read().splitlines()):
                    continue
                if not self._is_used():
                    self._end()
                    return
                wait = _USED_MILLISECONDS

    def close(self) -> None:
        """Stop watching."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
