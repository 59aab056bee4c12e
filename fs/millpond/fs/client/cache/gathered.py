# SPDX-License-Identifier: Apache-2.0
"""Pure: a piece of a new file that is gathered from small writes, and the attributes set behind it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Final

from millpond.fs.vfs.inode_api import Now, SetAttr
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes

EXTENT: Final = MAX_TRANSFER
"""Most bytes of one extent."""
_PERMISSIONS = 0o777
_MAX_TIME = 1 << 63  # nanoseconds: a message holds no time beyond it


@dataclass(eq=False, slots=True)
class Extent:
    """Bytes that were written one after the other from ``offset`` on; with ``append``, at the file's end.
    ``began`` is when the first byte was written, ``changes`` are the attributes set after the last. One that
    is ``sealed`` grows no more: it is being sent. The server has ``written`` bytes of it, and perhaps more if
    it is ``in_doubt``.
    """

    offset: int
    append: bool
    began: float
    data: bytearray
    changes: SetAttr | None = None
    sealed: bool = False
    written: int = 0
    in_doubt: bool = False

    def accepts(self, size: int, offset: int, append: bool) -> bool:
        """Return whether these bytes can be added."""
        follows = append if self.append else not append and offset == self.offset + len(self.data)
        return follows and not self.sealed and self.changes is None and len(self.data) + size <= EXTENT


def may_follow(changes: SetAttr) -> bool:
    """Return whether attributes may be set later, with a message: permissions and times that it can hold."""
    special = changes.mode is not None and changes.mode & ~_PERMISSIONS
    others = (changes.uid, changes.gid, changes.size) != (None, None, None)
    times = (time for time in (changes.atime, changes.mtime) if isinstance(time, int))
    return not special and not others and all(abs(time) < _MAX_TIME for time in times)


def merged(first: SetAttr | None, then: SetAttr) -> SetAttr:
    """Return the changes of both, ``then`` being the later."""
    if first is None:
        return then
    names = ("mode", "atime", "mtime")
    return replace(first, **{name: each for name in names if (each := getattr(then, name)) is not None})


def changed(known: Attributes, changes: SetAttr, end: int) -> Attributes:
    """Return the attributes of a file that is written up to ``end``, and changed then. They are the client's
    guess: the kernel may not cache them.
    """
    return replace(
        known,
        size=max(known.size, end),
        mode=known.mode if changes.mode is None else known.mode & ~_PERMISSIONS | changes.mode,
        atime=_time(changes.atime, known.atime),
        mtime=_time(changes.mtime, known.mtime),
    )


def _time(asked: int | Now | None, before: int) -> int:
    if asked is None:
        return before
    return time.time_ns() if asked == "now" else asked
