# SPDX-License-Identifier: Apache-2.0
"""Pure: the high-level file-system interface, by path, and the plain types that both interfaces share.

Paths are relative to the root of the volume, ``""`` is the root itself; names that are not UTF-8 carry
surrogate escapes, as everywhere in Python. Every error is an OSError with an errno, the only language that a
kernel understands. No symbolic link is followed here: the kernel above has resolved them.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import NewType, Protocol

Handle = NewType("Handle", int)

MAX_TRANSFER = 1 << 20
"""The most bytes that one read or write moves; a longer one is cut short, as read(2) and write(2) may."""


@dataclass(frozen=True, slots=True)
class Owner:
    """User and group that a new file is to belong to."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Attributes:
    """A file's attributes, as in stat(2): times in nanoseconds since 1970, ``size`` in bytes, ``blocks`` of
    512 bytes, ``rdev`` the device number of a device file.
    """

    inode: int
    mode: int
    links: int
    uid: int
    gid: int
    size: int
    blocks: int
    block_size: int
    atime: int
    mtime: int
    ctime: int
    rdev: int = 0


def attributes(status: os.stat_result) -> Attributes:
    """Convert the result of Python's stat calls."""
    return Attributes(
        status.st_ino,
        status.st_mode,
        status.st_nlink,
        status.st_uid,
        status.st_gid,
        status.st_size,
        status.st_blocks,
        status.st_blksize,
        status.st_atime_ns,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_rdev,
    )


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """One name in a directory; ``mode`` holds only the file's type."""

    name: str
    inode: int
    mode: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Space and inodes of a file system, as in statvfs(3); ``blocks``, ``free`` and ``available`` in units of
    ``fragment_size`` bytes.
    """

    block_size: int
    fragment_size: int
    blocks: int
    free: int
    available: int
    files: int
    files_free: int
    name_max: int


class PathFs(Protocol):
    """High-level file system, by path. Each method raises OSError, and nothing else, when it fails."""

    def getattr(self, path: str) -> Attributes:
        """Return the attributes of a file; of a symbolic link, its own."""

    def readdir(self, path: str) -> tuple[DirectoryEntry, ...]:
        """Return all names in a directory but ``.`` and ``..``."""

    def readlink(self, path: str) -> str:
        """Return the target of a symbolic link, as it was stored."""

    def mknod(self, path: str, mode: int, owner: Owner | None = None, rdev: int = 0) -> None:
        """Make a file of any type that mknod(2) can; only root of the machine can make devices (EPERM)."""

    def mkdir(self, path: str, mode: int, owner: Owner | None = None) -> None:
        """Make a directory."""

    def unlink(self, path: str) -> None:
        """Remove a name of a file."""

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""

    def symlink(self, target: str, path: str, owner: Owner | None = None) -> None:
        """Make a symbolic link at ``path`` that holds ``target`` as it is."""

    def rename(self, old: str, new: str) -> None:
        """Move a name, replacing what ``new`` was."""

    def link(self, old: str, new: str) -> None:
        """Give a file a second name."""

    def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits."""

    def chown(self, path: str, uid: int, gid: int) -> None:
        """Set the owner; -1 keeps one."""

    def truncate(self, path: str, size: int) -> None:
        """Cut or extend a file to ``size`` bytes."""

    def utimens(self, path: str, atime: int, mtime: int) -> None:
        """Set the times, in nanoseconds."""

    def open(self, path: str, flags: int, mode: int = 0, owner: Owner | None = None) -> Handle:
        """Open a regular file. Flags that count: access mode, O_CREAT, EXCL, TRUNC, APPEND, SYNC, DSYNC."""

    def read(self, handle: Handle, size: int, offset: int) -> bytes:
        """Return up to ``size`` bytes, fewer at the end of the file."""

    def write(self, handle: Handle, data: bytes, offset: int) -> int:
        """Write at ``offset``, or at the end if opened with O_APPEND. Returns how many bytes were written."""

    def flush(self, handle: Handle) -> None:
        """Note that a descriptor of this file was closed."""

    def fsync(self, handle: Handle, data_only: bool = False) -> None:
        """Return when the file is on the flash."""

    def release(self, handle: Handle) -> None:
        """Forget the handle of a file whose last descriptor was closed."""

    def statfs(self) -> Statistics:
        """Return how full the volume is."""

    def ftruncate(self, handle: Handle, size: int) -> None:
        """Cut or extend an open file to ``size`` bytes."""

    def fgetattr(self, handle: Handle) -> Attributes:
        """Return the attributes of an open file."""


def os_error(code: int, path: str = "") -> OSError:
    """Return the OSError of an errno."""
    return OSError(code, os.strerror(code), path)


def components(path: str) -> list[str]:
    """Split ``path`` into its names. Raises OSError: EINVAL for ``..``, ``.``, ``//`` or NUL."""
    if not path:
        return []
    names = path.split("/")
    if "\0" in path or any(name in ("", ".", "..") for name in names):
        raise os_error(errno.EINVAL, path)
    return names


def within(value: int, low: int, high: int) -> int:
    """Return ``value`` if ``low`` <= ``value`` <= ``high``. Raises OSError: EINVAL."""
    if not low <= value <= high:
        raise os_error(errno.EINVAL)
    return value
