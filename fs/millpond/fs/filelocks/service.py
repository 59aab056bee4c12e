"""Edge (threads, the clock): the file locks of the files that host and device share, and who waits for them.

Who leaves loses his locks, and so does who has lapsed once somebody else wants one of them. He hears of it
with his next request: an era of his locks has ended then.
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

_MOST_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_MOST_ANSWERS = 1024
_OWNERS = (1 << 64) - 1
_ASKED_WITH_ERA = r.SetLock | r.ReleaseLocks | r.CancelLock | r.AwaitLocks | r.DropLocks


class LockService:
    """``has_lapsed`` says of a holder that others need not respect his locks any more. Threads may call at
    once.
    """

    def __init__(self, has_lapsed: Callable[[int], bool]) -> None:
        self._has_lapsed = has_lapsed
        self._table, self._moved = LockTable(), threading.Condition()
        self._eras: dict[int, int] = {}
        first = int.from_bytes(os.urandom(6)) + 1
        self._next_era = itertools.count(first)  # no earlier process had one of these
        self._answers: dict[int, dict[int, int]] = {}

    def end(self, holder: int) -> None:
        """He is gone: all that he has is others'."""
        with self._moved:
            answers = self._table.end(holder)
            self._eras.pop(holder, None)
            self._deliver(answer for answer in answers if answer.holder != holder)
            self._answers.pop(holder, None)
            self._moved.notify_all()

    def count(self, holder: int) -> int:
        """How many locks he has."""
        with self._moved:
            return sum(lock.owner.holder == holder for _, _, lock in self._table.locks())

    def perform(self, holder: int, inode: int, request: r.LockRequest) -> r.LockReply:
        """Do what is asked of the file with this number. Raises OSError and ProtocolError."""
        with self._moved:
            if isinstance(request, _ASKED_WITH_ERA) and request.era != self._era(holder):
                return r.Regain(self._era(holder))
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
                case _:
                    raise ProtocolError(f"'{request.NAME}' is no request for file locks")
        return r.LockSet(0)

    def _era(self, holder: int) -> int:
        if holder not in self._eras:
            self._eras[holder] = next(self._next_era)
        return self._eras[holder]

    def _get(self, holder: int, inode: int, request: r.GetLock) -> r.LockReply:
        lock = _lock(holder, request)
        self._end_lapsed(inode, Family.POSIX, lock)
        found = self._table.getlk(inode, lock)
        if found is None:
            return r.LockIs(Mode.UNLOCK)
        return r.LockIs(found.mode, found.start, found.end, found.pid if found.owner.holder == holder else 0)

    def _set(self, holder: int, inode: int, request: r.SetLock) -> r.LockReply:
        lock, family = _lock(holder, request, request.pid), _family(request.flock)
        self._end_lapsed(inode, family, lock)
        if request.ticket is not None and len(self._answers.get(holder, ())) >= _MOST_ANSWERS:
            return r.LockSet(errno.ENOLCK)  # he does not ask what has become of them
        outcome = self._table.setlk(inode, family, lock, request.ticket)
        self._deliver(outcome.answers)
        return r.LockSet(outcome.error)

    def _await(self, holder: int, request: r.AwaitLocks) -> r.LockReply:
        end = time.monotonic() + min(max(0.0, request.seconds), _MOST_SECONDS)
        while request.era == self._era(holder):
            if found := self._answers.pop(holder, None):
                return r.LocksAnswered(tuple(found), tuple(found.values()))
            waits = self._end_in_the_way(holder)
            left = end - time.monotonic()
            if holder in self._answers:
                continue
            if left <= 0:
                return r.LocksAnswered((), ())
            self._moved.wait(min(left, _LOOK_SECONDS) if waits else left)
        return r.Regain(self._era(holder))

    def _end_in_the_way(self, holder: int) -> bool:
        """End who has lapsed and keeps this one waiting; whether he waits at all."""
        waiting = [each for each in self._table.waiting() if each[2].owner.holder == holder]
        for inode, family, lock in waiting:
            self._end_lapsed(inode, family, lock)
        return bool(waiting)

    def _end_lapsed(self, inode: int, family: Family, lock: Lock) -> None:
        for other in self._table.holders_in_the_way(inode, family, lock) - {lock.owner.holder}:
            if self._has_lapsed(other):
                self.end(other)

    def _deliver(self, answers: Iterable[LockAnswer]) -> None:
        for answer in answers:
            self._answers.setdefault(answer.holder, {})[answer.ticket] = answer.error
            self._moved.notify_all()


def _family(flock: bool) -> Family:
    return Family.FLOCK if flock else Family.POSIX


def _lock(holder: int, request: r.GetLock | r.SetLock, pid: int = 0) -> Lock:
    """Raises OSError: EINVAL for what is none."""
    owner = LockOwner(holder, within(request.owner, 0, _OWNERS))
    return Lock(owner, mode_of(request.mode), request.start, request.end, within(pid, 0, (1 << 32) - 1))
