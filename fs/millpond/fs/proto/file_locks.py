"""Pure: what is said of file locks to the process that has the table: by the host's client, over its lanes,
and by the device's mount, over the lock master's socket.

A ``file`` is a node to a client, an inode's number to the device's mount. Each request but GetLock names the
``era`` in which the server knows the asker's locks; in another one it has none any more, and answers Regain.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.fs.vfs.lock_types import OFFSET_MAX
from millpond.wire.messages import Kind, Message, message


class LockRequest(Message):
    """What is asked of file locks."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class OfFile(LockRequest):
    """What is asked of those of one file."""

    file: int


class LockReply(Message):
    """The reply to any of it."""

    __slots__ = ()


@message("fs.file-lock.get", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class GetLock(OfFile):
    """What is in the way of a POSIX lock. Answered by LockIs."""

    owner: int
    mode: int
    start: int
    end: int


@message("fs.file-lock.set", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class SetLock(OfFile):
    """Lock or unlock; ``flock``: of that family. With a ``ticket`` it waits. Answered by LockSet."""

    era: int
    flock: bool
    owner: int
    mode: int
    start: int = 0
    end: int = OFFSET_MAX
    pid: int = 0
    ticket: int | None = None


@message("fs.file-lock.release", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class ReleaseLocks(OfFile):
    """Unlock all that the owner has of one family. Answered by LockSet."""

    era: int
    flock: bool
    owner: int


@message("fs.file-lock.cancel", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class CancelLock(LockRequest):
    """A request shall wait no longer. Answered by LockSet: 0, or ENOENT if it does not wait."""

    era: int
    ticket: int


@message("fs.file-lock.await", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class AwaitLocks(LockRequest):
    """Answered by LocksAnswered once there is something to say, at the latest after so many seconds."""

    era: int
    seconds: float


@message("fs.file-lock.drop", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class DropLocks(LockRequest):
    """The asker does not know what it has: it shall have nothing, and regain what it knows of. Answered by
    LockSet.
    """

    era: int


@message("fs.file-lock.regain", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Regain(LockReply):
    """Not done: all locks and all that waited were given up, or never known, and ``era`` has begun."""

    era: int


@message("fs.file-lock.is", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class LockIs(LockReply):
    """What is in the way, F_UNLCK for nothing; ``pid`` 0 if it is another mount's."""

    mode: int
    start: int = 0
    end: int = 0
    pid: int = 0


@message("fs.file-lock.done", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class LockSet(LockReply):
    """0 or an errno; None if it waits."""

    error: int | None


@message("fs.file-lock.answered", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class LocksAnswered(LockReply):
    """What those with these tickets have come to: 0 or an errno each."""

    tickets: tuple[int, ...]
    errors: tuple[int, ...]
