"""Pure: what a file lock is: its family, mode, owner and range, as Linux has them."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

from millpond.fs.vfs.path_api import os_error

OFFSET_MAX: Final = (1 << 63) - 1
"""The last byte of a range to the end of the file, wherever that is."""


class Family(Enum):
    """What fcntl's locks and flock's are."""

    POSIX = "posix"
    FLOCK = "flock"


class Mode(IntEnum):
    """Linux's F_RDLCK, F_WRLCK and F_UNLCK. Readers share."""

    READ = 0
    WRITE = 1
    UNLOCK = 2


def mode_of(number: int) -> Mode:
    """The mode with this number. Raises OSError: EINVAL if there is none."""
    try:
        return Mode(number)
    except ValueError:
        raise os_error(errno.EINVAL) from None


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Whose a lock is: the kernel's ``number`` for a process (POSIX) or an open file (flock), in the mount
    or session of ``holder``.
    """

    holder: int
    number: int


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock, or one that is asked for, of the bytes ``start`` to ``end``, both inclusive. Raises OSError:
    EINVAL for bytes that no file has.
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
        """Whether not both can be held."""
        overlap = self.start <= other.end and other.start <= self.end
        return overlap and self.owner != other.owner and Mode.WRITE in (self.mode, other.mode)


HERE = 0
"""The one holder of a table that is not shared."""
