# SPDX-License-Identifier: Apache-2.0
"""Pure: messages about file locks from the host's client, over its session.

``epoch`` is when the server has released all locks of the client last: a request with an earlier one is not
performed. ``serial`` counts the client's requests that change locks. One that is given up, and may still be
on its way, is not performed after a ReleaseLocks with a higher number.
"""

from __future__ import annotations

from millpond.fs.vfs.lock_types import OFFSET_MAX
from millpond.wire.messages import Kind, Message, message


class LockReply(Message):
    """Base of the replies to SetLock."""

    __slots__ = ()


@message("fs.file-lock.get", Kind.VOLUME)
class GetLock(Message):
    """Find a lock that conflicts with a POSIX lock. Answered by LockIs."""

    file: int
    owner: int
    mode: int
    start: int
    end: int


@message("fs.file-lock.set", Kind.VOLUME)
class SetLock(Message):
    """Lock or unlock, in the FLOCK family if ``flock``. It never waits for other owners, but, unless it is a
    ``reclaim``, for other hosts that reclaim theirs. Answered by LockSet or LocksDropped.
    """

    file: int
    epoch: int
    serial: int
    flock: bool
    owner: int
    mode: int
    start: int = 0
    end: int = OFFSET_MAX
    reclaim: bool = False


@message("fs.file-lock.release", Kind.VOLUME)
class ReleaseLocks(Message):
    """Release all locks of a file, by its inode number, that the owner has in one family. Not answered."""

    inode: int
    serial: int
    flock: bool
    owner: int


@message("fs.file-lock.epoch", Kind.VOLUME)
class GetLockEpoch(Message):
    """Get the present epoch; if it is the ``known`` one, the client has reclaimed its locks, and others that
    wait for that may lock. Answered by LocksDropped.
    """

    known: int


@message("fs.file-lock.dropped", Kind.VOLUME)
class LocksDropped(LockReply):
    """The present epoch: a client that knows another one has no locks any more, and reclaims them."""

    epoch: int


@message("fs.file-lock.is", Kind.VOLUME)
class LockIs(Message):
    """The conflicting lock, F_UNLCK for none."""

    mode: int
    start: int = 0
    end: int = 0


@message("fs.file-lock.done", Kind.VOLUME)
class LockSet(LockReply):
    """Result: 0 or an errno; None if the request was not performed because of its number: it may be sent
    again with another.
    """

    error: int | None
