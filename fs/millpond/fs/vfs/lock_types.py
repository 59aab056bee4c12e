# SPDX-License-Identifier: Apache-2.0
"""Pure: the types of file locks, as Linux has them: family, mode, owner and byte range."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

from millpond.fs.vfs.path_api import os_error

OFFSET_MAX: Final = (1 << 63) - 1
"""The last byte of a range to the end of the file, wherever that is."""


class Family(Enum):
    """The two lock families, which do not see each other: POSIX (fcntl) and FLOCK (flock)."""

    POSIX = "posix"
    FLOCK = "flock"


class Mode(IntEnum):
    """Linux's F_RDLCK, F_WRLCK and F_UNLCK. Readers share."""

    READ = 0
    WRITE = 1
    UNLOCK = 2


def mode_of(number: int) -> Mode:
    """Return the mode with this number. Raises OSError: EINVAL if there is none."""
    try:
        return Mode(number)
    except ValueError:
        raise os_error(errno.EINVAL) from None


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Owner of a lock: the kernel's ``number`` of a process (POSIX) or an open file (flock), in the mount or
    client session ``holder``.
    """

    holder: int
    number: int


@dataclass(frozen=True, slots=True)
class Lock:
    """A held or requested lock of the bytes ``start`` to ``end``, both inclusive. Raises OSError: EINVAL for
    a range that no file has.
    """

    owner: LockOwner
    mode: Mode
    start: int = 0
    end: int = OFFSET_MAX
    pid: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end <= OFFSET_MAX:
            raise os_error(errno.EINVAL)

    def conflicts(self, other: Lock) -> bool:
        """Return whether the two locks cannot both be held."""
        overlap = self.start <= other.end and other.start <= self.end
        return overlap and self.owner != other.owner and Mode.WRITE in (self.mode, other.mode)


HERE = 0
"""Holder number of this mount, in a lock table that is not shared."""
