# SPDX-License-Identifier: Apache-2.0
"""Pure: the quota of the public part: bytes and files in use, and reservations.

Each change of a file's blocks is announced first and committed afterwards with the blocks that the file then
has. A write reserves the most that it can take, and is refused before anything is written: an answered write
has had its room. Blocks are of 512 bytes, as in stat(2).
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace

from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes, Statistics, os_error

_BLOCK = 512
_TOLERATED = MAX_TRANSFER
"""Bytes over the limit up to which existing blocks may still be overwritten: the file system's own metadata
for a file is known only afterwards.
"""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A change of a file that has begun; it may take ``size`` bytes."""

    inode: int
    size: int


@dataclass(slots=True)
class _Changing:
    blocks: int
    changes: int = 0


def growth(before: Attributes, offset: int, length: int) -> int:
    """Return the most bytes that a write can take: those of the file system's blocks that it touches, but no
    more than the file lacks to be without holes. (It can take more where space was allocated beyond the
    file's end.)
    """
    if not length:
        return 0
    unit, end = before.block_size, offset + length
    touched = _up(end, unit) - offset // unit * unit
    return max(0, min(touched, _up(max(before.size, end), unit) - before.blocks * _BLOCK))


def drifted(counted: int, low: int, high: int) -> int:
    """Return by how much a count is certainly wrong that said ``low`` to ``high`` while ``counted`` was
    counted.
    """
    return counted - max(low, min(counted, high))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Quota:
    """``limit`` bytes, of which the existing files take ``used``. The blocks that a caller passes, at the
    begin of a change and at its end, must be the file's at the time of the call.
    """

    def __init__(self, limit: int, used: int, files: int) -> None:
        self.limit, self.used, self.files = limit, used, files
        self._reserved = 0
        self._changing: dict[int, _Changing] = {}

    @property
    def left(self) -> int:
        """Bytes that can be reserved."""
        return max(0, self.limit - self.used - self._reserved)

    @property
    def quiet(self) -> bool:
        """Whether no change is under way."""
        return not self._changing

    def reserve(self, inode: int, blocks: int, size: int) -> Reservation:
        """Begin a change that can take ``size`` bytes, of a file that has ``blocks``. Raises OSError:
        ENOSPC.
        """
        if size > self.left or self.used > self.limit + _TOLERATED:
            raise os_error(errno.ENOSPC)
        return self._begin(inode, blocks, size)

    def watch(self, inode: int, blocks: int) -> Reservation:
        """Begin a change that is never refused: it takes nothing, as a removal."""
        return self._begin(inode, blocks, 0)

    def _begin(self, inode: int, blocks: int, size: int) -> Reservation:
        self._changing.setdefault(inode, _Changing(blocks)).changes += 1
        self._reserved += size
        return Reservation(inode, size)

    def commit(self, reservation: Reservation, blocks: int, files: int = 0) -> None:
        """End a change, whether it succeeded or not: the file has ``blocks`` now, 0 if it is gone, and there
        are ``files`` more, or fewer, than before.
        """
        file = self._changing[reservation.inode]
        self.used = max(0, self.used + (blocks - file.blocks) * _BLOCK)
        self.files = max(0, self.files + files)
        self._reserved -= reservation.size
        file.blocks = blocks
        file.changes -= 1
        if not file.changes:
            del self._changing[reservation.inode]

    def recount(self, used: int, files: int) -> None:
        """Set the use to what was counted while no change was under way."""
        self.used, self.files = used, files

    def clipped(self, statistics: Statistics) -> Statistics:
        """Limit the file system's statistics to the quota; each file there is room for takes a block."""
        left = self.left // statistics.fragment_size
        files_free = min(statistics.files_free, left)
        return replace(
            statistics,
            blocks=min(statistics.blocks, self.limit // statistics.fragment_size),
            free=min(statistics.free, left),
            available=min(statistics.available, left),
            files=self.files + files_free,
            files_free=files_free,
        )
