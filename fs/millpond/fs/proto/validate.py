# SPDX-License-Identifier: Apache-2.0
"""Pure: checks that a server's replies hold only values that a file, a lock or a file system can have.

A reply may still be wrong; it is never one that no kernel can be given.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Iterable
from typing import Any

from millpond.base.errors import ProtocolError
from millpond.fs.proto import extended as x
from millpond.fs.proto import file_locks as r
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.lock_types import OFFSET_MAX, Mode
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes
from millpond.wire.messages import Message

_SHORT, _LONG = (1 << 32) - 1, (1 << 64) - 1
_MAX_MODE = 0o177777
_MAX_TARGET = 4095  # bytes: a kernel takes no longer one
_MAX_LEASE = 3600.0  # seconds
_TYPES = {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK}


def require_possible(reply: Message) -> None:
    """Raise ProtocolError if a reply holds impossible values."""
    if not _is_possible(reply):
        raise ProtocolError(f"'{reply.NAME}' says what cannot be so")


def _is_possible(reply: Message | None) -> bool:
    check = _CHECKS.get(type(reply))
    return check is None or check(reply)


def _is_welcome(reply: p.SessionWelcome) -> bool:
    ids = (0,) if reply.owner is None else (reply.owner.uid, reply.owner.gid)
    in_order = reply.verifier != 0 and reply.performed >= 0 and 0 < reply.lease <= _MAX_LEASE
    return in_order and _are_within(ids, 0, _SHORT - 1) and 0 <= reply.root_inode <= _LONG


def _are_statistics(reply: p.StatisticsAre) -> bool:
    s = reply.statistics
    counts = (s.blocks, s.free, s.available, s.files, s.files_free)
    sizes = (s.block_size, s.fragment_size, s.name_max)
    return _are_within(counts, 0, _LONG) and _are_within(sizes, 1, _SHORT)


def _is_lock(reply: r.LockIs) -> bool:
    return 0 <= reply.mode <= Mode.UNLOCK and 0 <= reply.start <= reply.end <= OFFSET_MAX


_CHECKS: dict[type[Message | None], Callable[[Any], bool]] = {
    p.FoundIs: lambda reply: are_possible(reply.attributes) and _is_possible(reply.directory),
    p.AttributesAre: lambda reply: are_possible(reply.attributes),
    p.Changed: lambda reply: all(map(_is_possible, reply.directories)),
    p.Opened: lambda reply: _is_possible(reply.found),
    p.Written: lambda reply: 0 <= reply.count <= MAX_TRANSFER and _is_possible(reply.file),
    x.XattrsAre: lambda reply: _is_possible(reply.file),
    p.OffsetIs: lambda reply: 0 <= reply.offset <= OFFSET_MAX,
    p.Link: lambda reply: 0 < len(reply.target) <= _MAX_TARGET and b"\0" not in reply.target,
    p.StatisticsAre: _are_statistics,
    p.SessionWelcome: _is_welcome,
    r.LockIs: _is_lock,
    r.LockSet: lambda reply: reply.error is None or are_outcomes([reply.error]),
}


def are_outcomes(errors: Iterable[int]) -> bool:
    """Return whether each is 0 or an errno."""
    return all(error == 0 or error in errno.errorcode for error in errors)


def are_possible(a: Attributes) -> bool:
    """Return whether a file can have these attributes."""
    return (
        0 <= a.mode <= _MAX_MODE
        and stat.S_IFMT(a.mode) in _TYPES
        and 0 <= a.size <= OFFSET_MAX
        and _are_within((a.inode, a.blocks), 0, _LONG)
        and _are_within((a.links, a.uid, a.gid, a.rdev, a.block_size), 0, _SHORT)
    )


def _are_within(numbers: tuple[int, ...], low: int, high: int) -> bool:
    return low <= min(numbers) and max(numbers) <= high
