# SPDX-License-Identifier: Apache-2.0
"""Pure: messages about file locks to the process that has the lock table: from the host's client over its
session, and from the device's mount over the delegation manager's socket.

A ``file`` is a node to a client, an inode number to the device's mount. Each request but GetLock names the
lock ``epoch`` in which the server knows the sender's locks; in another epoch the server has none of them any
more, and answers Regain.
"""

from __future__ import annotations

from millpond.fs.vfs.lock_types import OFFSET_MAX
from millpond.wire.messages import Kind, Message, message, message_base


class LockRequest(Message):
    """Base of all requests about file locks."""

    __slots__ = ()


@message_base
class OfFile(LockRequest):
    """Base of the requests about the locks of one file."""

    file: int


class LockReply(Message):
    """Base of the replies to LockRequest."""

    __slots__ = ()


@message("fs.file-lock.get", Kind.VOLUME)
class GetLock(OfFile):
    """Find the first lock that conflicts with a POSIX lock. Answered by LockIs."""

    owner: int
    mode: int
    start: int
    end: int


@message("fs.file-lock.set", Kind.VOLUME)
class SetLock(OfFile):
    """Lock or unlock, in the FLOCK family if ``flock``. With a ``ticket`` the request waits. Answered by
    LockSet.
    """

    epoch: int
    flock: bool
    owner: int
    mode: int
    start: int = 0
    end: int = OFFSET_MAX
    pid: int = 0
    ticket: int | None = None


@message("fs.file-lock.release", Kind.VOLUME)
class ReleaseLocks(OfFile):
    """Release all locks that the owner has in one family. Answered by LockSet."""

    epoch: int
    flock: bool
    owner: int


@message("fs.file-lock.cancel", Kind.VOLUME)
class CancelLock(LockRequest):
    """Cancel a waiting request. Answered by LockSet: 0, or ENOENT if it does not wait."""

    epoch: int
    ticket: int


@message("fs.file-lock.await", Kind.VOLUME)
class AwaitLocks(LockRequest):
    """Poll for the answers of waiting requests, for ``seconds`` at most. Answered by LocksAnswered."""

    epoch: int
    seconds: float


@message("fs.file-lock.drop", Kind.VOLUME)
class DropLocks(LockRequest):
    """Release all locks of the sender, which does not know them any more and is about to reclaim those it
    knows. Answered by LockSet.
    """

    epoch: int


@message("fs.file-lock.drop-file", Kind.VOLUME)
class DropFileLocks(OfFile):
    """Release all locks of the sender of one file and end its waiting requests for it: the sender is not sure
    which the server has, and is about to reclaim those it knows. Answered by LockEpochBegun.
    """

    epoch: int


@message("fs.file-lock.epoch", Kind.VOLUME)
class LockEpochBegun(LockReply):
    """Done; lock epoch ``epoch`` has begun, in which the sender keeps its locks of all other files: no
    earlier request that is still under way will be performed.
    """

    epoch: int


@message("fs.file-lock.regain", Kind.VOLUME)
class Regain(LockReply):
    """Nothing was done: the server has no locks of the sender, and lock epoch ``epoch`` has begun. The sender
    reclaims its locks.
    """

    epoch: int


@message("fs.file-lock.is", Kind.VOLUME)
class LockIs(LockReply):
    """The conflicting lock, F_UNLCK for none; ``pid`` is 0 if another mount holds it."""

    mode: int
    start: int = 0
    end: int = 0
    pid: int = 0


@message("fs.file-lock.done", Kind.VOLUME)
class LockSet(LockReply):
    """Result: 0 or an errno; None if the request waits."""

    error: int | None


@message("fs.file-lock.answered", Kind.VOLUME)
class LocksAnswered(LockReply):
    """Results of waiting requests, by ticket: 0 or an errno each."""

    tickets: tuple[int, ...]
    errors: tuple[int, ...]
