# SPDX-License-Identifier: Apache-2.0
"""Edge (threads, the clock): the file locks of the files that host and device share, and the requests that
wait.

A holder that leaves loses its locks at once, one whose lease has expired once somebody else wants one of
them. The holder learns of it from its next request, which is answered with a new lock epoch.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable

from millpond.base.errors import ProtocolError
from millpond.fs.filelocks.table import LockAnswer, LockTable
from millpond.fs.proto import file_locks as r
from millpond.fs.vfs.lock_types import Family, Lock, LockOwner, Mode, mode_of
from millpond.fs.vfs.path_api import within

_MAX_SECONDS = 5.0
_POLL_SECONDS = 0.2
_MAX_ANSWERS = 1024
_OWNERS = (1 << 64) - 1
_EPOCH_REQUESTS = r.SetLock | r.ReleaseLocks | r.CancelLock | r.AwaitLocks | r.DropLocks | r.DropFileLocks


class LockService:
    """Lock table of a volume and its waiting requests. ``has_expired`` returns whether a holder's locks need
    not be respected any more. Threads may call at once.
    """

    def __init__(self, has_expired: Callable[[int], bool]) -> None:
        self._has_lapsed = has_expired
        self._table, self._changed = LockTable(), threading.Condition()
        self._epochs: dict[int, int] = {}
        first = int.from_bytes(os.urandom(6)) + 1
        self._next_epoch = itertools.count(first)  # no earlier process had one of these epochs
        self._answers: dict[int, dict[int, LockAnswer]] = {}

    def end(self, holder: int) -> None:
        """Release all locks of a holder that is gone, and end its lock epoch."""
        with self._changed:
            answers = self._table.end(holder)
            self._epochs.pop(holder, None)
            self._deliver(answer for answer in answers if answer.holder != holder)
            self._answers.pop(holder, None)
            self._changed.notify_all()

    def count(self, holder: int) -> int:
        """Return how many locks the holder has."""
        with self._changed:
            return sum(lock.owner.holder == holder for _, _, lock in self._table.locks())

    def perform(self, holder: int, inode: int, request: r.LockRequest) -> r.LockReply:
        """Perform a request about the file with this inode number. Raises OSError and ProtocolError."""
        with self._changed:
            if isinstance(request, _EPOCH_REQUESTS) and request.epoch != self._epoch(holder):
                return r.Regain(self._epoch(holder))
            match request:
                case r.GetLock():
                    return self._get(holder, inode, request)
                case r.SetLock():
                    return self._set(holder, inode, request)
                case r.ReleaseLocks():
                    owner = LockOwner(holder, request.owner)
                    self._deliver(self._table.release(inode, _family(request.flock), owner))
                case r.CancelLock():
                    return r.LockSet(0 if self._table.cancel(holder, request.ticket) else errno.ENOENT)
                case r.AwaitLocks():
                    return self._await(holder, request)
                case r.DropLocks():
                    self.end(holder)
                case r.DropFileLocks():
                    return self._drop_file(holder, inode)
                case _:
                    raise ProtocolError(f"'{request.NAME}' is no request for file locks")
        return r.LockSet(0)

    def _drop_file(self, holder: int, inode: int) -> r.LockEpochBegun:
        kept = {ticket: each for ticket, each in self._answers.pop(holder, {}).items() if each.inode != inode}
        if kept:
            self._answers[holder] = kept
        self._deliver(self._table.drop(holder, inode))
        self._epochs[holder] = next(self._next_epoch)
        self._changed.notify_all()
        return r.LockEpochBegun(self._epochs[holder])

    def _epoch(self, holder: int) -> int:
        if holder not in self._epochs:
            self._epochs[holder] = next(self._next_epoch)
        return self._epochs[holder]

    def _get(self, holder: int, inode: int, request: r.GetLock) -> r.LockReply:
        lock = _lock(holder, request)
        self._end_expired(inode, Family.POSIX, lock)
        found = self._table.getlk(inode, lock)
        if found is None:
            return r.LockIs(Mode.UNLOCK)
        return r.LockIs(found.mode, found.start, found.end, found.pid if found.owner.holder == holder else 0)

    def _set(self, holder: int, inode: int, request: r.SetLock) -> r.LockReply:
        lock, family = _lock(holder, request, request.pid), _family(request.flock)
        self._end_expired(inode, family, lock)
        if request.ticket is not None:  # sent again in another epoch
            self._table.cancel(holder, request.ticket)
            self._forget_answer(holder, request.ticket)
        if request.ticket is not None and len(self._answers.get(holder, ())) >= _MAX_ANSWERS:
            return r.LockSet(errno.ENOLCK)  # the holder does not poll for its answers
        outcome = self._table.setlk(inode, family, lock, request.ticket)
        self._deliver(outcome.answers)
        return r.LockSet(outcome.error)

    def _await(self, holder: int, request: r.AwaitLocks) -> r.LockReply:
        end = time.monotonic() + min(max(0.0, request.seconds), _MAX_SECONDS)
        while request.epoch == self._epoch(holder):
            if found := self._answers.pop(holder, None):
                return r.LocksAnswered(tuple(found), tuple(answer.error for answer in found.values()))
            waits = self._end_expired_conflicts(holder)
            left = end - time.monotonic()
            if holder in self._answers:
                continue
            if left <= 0:
                return r.LocksAnswered((), ())
            self._changed.wait(min(left, _POLL_SECONDS) if waits else left)
        return r.Regain(self._epoch(holder))

    def _end_expired_conflicts(self, holder: int) -> bool:
        """End holders that have expired and keep this one waiting. Returns whether this one waits at all."""
        waiting = [each for each in self._table.waiting() if each[2].owner.holder == holder]
        for inode, family, lock in waiting:
            self._end_expired(inode, family, lock)
        return bool(waiting)

    def _end_expired(self, inode: int, family: Family, lock: Lock) -> None:
        for other in self._table.conflicting_holders(inode, family, lock) - {lock.owner.holder}:
            if self._has_lapsed(other):
                self.end(other)

    def _forget_answer(self, holder: int, ticket: int) -> None:
        answers = self._answers.get(holder, {})
        if answers.pop(ticket, None) and not answers:
            del self._answers[holder]

    def _deliver(self, answers: Iterable[LockAnswer]) -> None:
        for answer in answers:
            self._answers.setdefault(answer.holder, {})[answer.ticket] = answer
            self._changed.notify_all()


def _family(flock: bool) -> Family:
    return Family.FLOCK if flock else Family.POSIX


def _lock(holder: int, request: r.GetLock | r.SetLock, pid: int = 0) -> Lock:
    """Build the lock of a request. Raises OSError: EINVAL for values that no lock can have."""
    owner = LockOwner(holder, within(request.owner, 0, _OWNERS))
    return Lock(owner, mode_of(request.mode), request.start, request.end, within(pid, 0, (1 << 32) - 1))
