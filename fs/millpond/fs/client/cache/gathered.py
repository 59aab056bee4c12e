# SPDX-License-Identifier: Apache-2.0
"""Pure: gathers the small writes of a file into extents, and the attributes that are set after them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from millpond.fs.vfs.inode_api import Buffer, SetAttr
from millpond.fs.vfs.path_api import MAX_TRANSFER

EXTENT: Final = MAX_TRANSFER
"""Most bytes of one extent."""
_QUEUED = 3
_PERMISSIONS = 0o777
_MAX_TIME = 1 << 63  # nanoseconds: a message holds no time beyond it


@dataclass(eq=False, slots=True)
class Extent:
    """Bytes that were written one after the other from ``offset`` on; with ``append``, at the file's end.
    ``changes`` are the attributes set after them, ``began`` is when the first byte was written. One that is
    ``sealed`` grows no more: it is being sent. The server has ``written`` bytes of it.
    """

    offset: int
    append: bool
    began: float
    data: bytearray
    changes: SetAttr | None = None
    sealed: bool = False
    written: int = 0

    def accepts(self, size: int, offset: int, append: bool) -> bool:
        """Return whether these bytes can be added."""
        follows = append if self.append else not append and offset == self.offset + len(self.data)
        return follows and not self.sealed and self.changes is None and len(self.data) + size <= EXTENT


class GatheredWrites:
    """The extents of one file, in their order. One thread may call at once."""

    def __init__(self) -> None:
        self.extents: deque[Extent] = deque()

    @property
    def size(self) -> int:
        """Number of bytes that are gathered."""
        return sum(len(extent.data) for extent in self.extents)

    @property
    def are_full(self) -> bool:
        """Whether no extent may be added."""
        return len(self.extents) > _QUEUED

    def begin(self, data: Buffer, offset: int, append: bool, now: float) -> Extent:
        """Add an extent that begins with these bytes, and seal the one before."""
        if self.extents:
            self.extents[-1].sealed = True
        self.extents.append(Extent(offset, append, now, bytearray(data)))
        return self.extents[-1]

    def set(self, changes: SetAttr) -> bool:
        """Add attributes to be set behind the last byte. False if that cannot be told together."""
        last = self.extents[-1] if self.extents else None
        if last is None or last.sealed or not may_follow(changes):
            return False
        if last.append:  # the server may be asked again if it has to wait for the attributes alone
            return False
        last.changes = changes if last.changes is None else _merged(last.changes, changes)
        return True


def may_follow(changes: SetAttr) -> bool:
    """Return whether attributes may be set later, with a message: permissions and times that it can hold."""
    special = changes.mode is not None and changes.mode & ~_PERMISSIONS
    others = (changes.uid, changes.gid, changes.size) != (None, None, None)
    times = (time for time in (changes.atime, changes.mtime) if isinstance(time, int))
    return not special and not others and all(abs(time) < _MAX_TIME for time in times)


def _merged(first: SetAttr, then: SetAttr) -> SetAttr:
    """Return the changes of both, ``then`` being the later."""
    names = ("mode", "atime", "mtime")
    return replace(first, **{name: each for name in names if (each := getattr(then, name)) is not None})
