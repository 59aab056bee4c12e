# SPDX-License-Identifier: Apache-2.0
"""Pure: the plain types that the interfaces by node and by path share, and how paths are written.

Paths are relative to the root of the volume, ``""`` is the root itself; names that are not UTF-8 carry
surrogate escapes, as everywhere in Python. Every error is an OSError with an errno, the only language that a
kernel understands.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NewType

from millpond.base.text import printable

Handle = NewType("Handle", int)
_DEEPEST = 8

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
    512 bytes, ``rdev`` the device number of a device file. ``bare``: it is known to have no extended
    attributes.
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
    bare: bool = field(default=False, compare=False, kw_only=True)

    def fields(self) -> tuple[int, ...]:
        """Return the values in their order, without ``bare``."""
        return _FIELDS(self)


_FIELDS: Callable[[Attributes], tuple[int, ...]] = attrgetter(*Attributes.__match_args__)


stat_fields: Callable[[os.stat_result], tuple[int, ...]] = attrgetter(
    "st_ino",
    "st_mode",
    "st_nlink",
    "st_uid",
    "st_gid",
    "st_size",
    "st_blocks",
    "st_blksize",
    "st_atime_ns",
    "st_mtime_ns",
    "st_ctime_ns",
    "st_rdev",
)
"""Returns what Python's stat calls tell, in the order of Attributes."""


def attributes(status: os.stat_result) -> Attributes:
    """Convert the result of Python's stat calls."""
    return Attributes(*stat_fields(status))


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """One name in a directory; ``mode`` holds only the file's type, ``offset`` is where the listing goes on
    behind it (telldir).
    """

    name: str
    inode: int
    mode: int
    offset: int = 0


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


def os_error(code: int, path: str = "") -> OSError:
    """Return the OSError of an errno."""
    return OSError(code, os.strerror(code), path)


def causes(error: BaseException | None) -> str:
    """Return what led to an error, from the first cause on."""
    said: list[str] = []
    while error is not None and len(said) < _DEEPEST:
        text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        said += [text] if text not in said else []
        error = error.__cause__
    return printable(": ".join(said[1:] or said)) or "no cause is known"


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
