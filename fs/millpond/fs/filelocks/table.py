# SPDX-License-Identifier: Apache-2.0
"""Pure: the table of file locks, as Linux has them: POSIX locks of byte ranges (fcntl) and BSD locks of whole
files (flock), which do not see each other.

Nothing blocks here: requests that a release or the end of a holder lets through are returned as answers to
waiting requests. As in Linux a waiting request conflicts with no other, and deadlock is detected when a wait
begins.
"""

from __future__ import annotations

import errno
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from millpond.fs.vfs.lock_types import OFFSET_MAX, Family, Lock, LockOwner, Mode
from millpond.fs.vfs.path_api import os_error

_MAX_LOCKS = 4096
_MAX_WAITERS = 256


@dataclass(frozen=True, slots=True)
class LockAnswer:
    """Answer to a waiting request for a lock of a file: 0 if it has the lock now, else an errno."""

    holder: int
    ticket: int
    error: int
    inode: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class LockOutcome:
    """Outcome of a request: ``error`` is 0 if it is done, None if it waits, else an errno. ``answers`` go to
    other requests that have waited.
    """

    error: int | None
    answers: tuple[LockAnswer, ...] = ()


_Place = tuple[int, Family]
_Ticket = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Waiter:
    place: _Place
    lock: Lock
    ticket: int

    @property
    def key(self) -> _Ticket:
        return self.lock.owner.holder, self.ticket


class LockTable:
    """Locks of all files, by inode number. Each holder has a limit of locks and of waiting requests, so that
    none can fill the memory or keep all others busy.
    """

    def __init__(self, most_locks: int = _MAX_LOCKS, most_waiters: int = _MAX_WAITERS) -> None:
        self._most_locks, self._most_waiters = most_locks, most_waiters
        self._held: dict[_Place, dict[LockOwner, list[Lock]]] = {}
        self._queues: dict[_Place, dict[_Ticket, _Waiter]] = {}
        self._waiting: dict[_Ticket, _Waiter] = {}
        self._locks: Counter[int] = Counter()
        self._waiters: Counter[int] = Counter()

    def getlk(self, inode: int, lock: Lock) -> Lock | None:
        """Return the first POSIX lock that conflicts with ``lock``. Raises OSError: EINVAL for an unlock."""
        if lock.mode is Mode.UNLOCK:
            raise os_error(errno.EINVAL)
        return next(self._conflicts((inode, Family.POSIX), lock), None)

    def conflicting_holders(self, inode: int, family: Family, lock: Lock) -> set[int]:
        """Return the holders whose locks conflict with ``lock``."""
        if lock.mode is Mode.UNLOCK:
            return set()
        return {held.owner.holder for held in self._conflicts((inode, family), lock)}

    def setlk(self, inode: int, family: Family, lock: Lock, ticket: int | None = None) -> LockOutcome:
        """Lock, change a lock's mode or unlock. With a ``ticket`` the request waits for conflicting locks,
        unless that would deadlock (EDEADLK); without one it fails (EAGAIN, which is EWOULDBLOCK). ENOLCK
        beyond the limits; EINVAL for a ticket of the holder that waits already.
        """
        place = (inode, family)
        if (lock.owner.holder, ticket) in self._waiting:
            return LockOutcome(errno.EINVAL)
        if family is Family.FLOCK:
            lock = replace(lock, start=0, end=OFFSET_MAX)
            self._release_owner(place, lock.owner)  # flock(2): changing the mode may lose the lock
        error: int | None
        if lock.mode is Mode.UNLOCK or not self._blocked(place, lock):
            error = self._apply(place, lock)
        else:
            error = self._wait(place, lock, ticket)
        return LockOutcome(error, self._grant_waiters(place))

    def release(self, inode: int, family: Family, owner: LockOwner) -> tuple[LockAnswer, ...]:
        """Release all locks of the owner, on close(2). Its waiting requests go on waiting."""
        place = (inode, family)
        self._release_owner(place, owner)
        return self._grant_waiters(place)

    def end(self, holder: int) -> tuple[LockAnswer, ...]:
        """Release all locks of a holder that is gone. Its own waiting requests are answered EIO."""
        mine = [waiter for waiter in self._waiting.values() if waiter.lock.owner.holder == holder]
        answers = [self._answered(waiter, errno.EIO) for waiter in mine]
        places = [(place, list(owners)) for place, owners in self._held.items()]
        for place, owners in places:
            gone = [owner for owner in owners if owner.holder == holder]
            for owner in gone:
                self._release_owner(place, owner)
            if gone:
                answers += self._grant_waiters(place)
        return tuple(answers)

    def drop(self, holder: int, inode: int) -> tuple[LockAnswer, ...]:
        """Release all locks that a holder has of one file. Its own waiting requests for it get no answer."""
        answers: tuple[LockAnswer, ...] = ()
        for place in ((inode, family) for family in Family):
            for waiter in list(self._queues.get(place, {}).values()):
                if waiter.lock.owner.holder == holder:
                    self._leave(waiter)
            for owner in [one for one in self._held.get(place, {}) if one.holder == holder]:
                self._release_owner(place, owner)
            answers += self._grant_waiters(place)
        return answers

    def cancel(self, holder: int, ticket: int) -> bool:
        """Cancel a request (FUSE's INTERRUPT). Returns whether it was still waiting, and is to be answered
        EINTR.
        """
        waiter = self._waiting.get((holder, ticket))
        if waiter is not None:
            self._leave(waiter)
        return waiter is not None

    def locks(self) -> Iterator[tuple[int, Family, Lock]]:
        """Iterate over all locks that are held."""
        for (inode, family), owners in self._held.items():
            for locks in owners.values():
                for lock in locks:
                    yield inode, family, lock

    def waiting(self) -> Iterator[tuple[int, Family, Lock]]:
        """Iterate over all locks that are waited for, the longest wait first."""
        for waiter in self._waiting.values():
            yield *waiter.place, waiter.lock

    def _blocked(self, place: _Place, lock: Lock) -> bool:
        return any(True for _ in self._conflicts(place, lock))

    def _conflicts(self, place: _Place, lock: Lock) -> Iterator[Lock]:
        """Iterate over the locks that conflict with ``lock``, in Linux's order: first those of the owner that
        has had locks longest.
        """
        for locks in self._held.get(place, {}).values():
            for number in range(bisect_left(locks, lock.start, key=lambda held: held.end), len(locks)):
                if locks[number].start > lock.end:
                    break
                if lock.conflicts(locks[number]):
                    yield locks[number]

    def _apply(self, place: _Place, lock: Lock) -> int:
        """Apply a lock that conflicts with nothing, within the holder's limit of locks."""
        holder, before = lock.owner.holder, self._held.get(place, {}).get(lock.owner, [])
        after = replaced(before, lock)
        if self._locks[holder] + len(after) - len(before) > self._most_locks:
            return errno.ENOLCK
        self._put(place, lock.owner, after)
        return 0

    def _release_owner(self, place: _Place, owner: LockOwner) -> None:
        self._put(place, owner, [])

    def _put(self, place: _Place, owner: LockOwner, locks: list[Lock]) -> None:
        owners = self._held.setdefault(place, {})
        _count(self._locks, owner.holder, len(locks) - len(owners.get(owner, ())))
        if locks:
            owners[owner] = locks
        else:
            owners.pop(owner, None)
        if not owners:
            del self._held[place]

    def _wait(self, place: _Place, lock: Lock, ticket: int | None) -> int | None:
        if ticket is None:
            return errno.EAGAIN
        if place[1] is Family.POSIX and self._deadlocks(place, lock):
            return errno.EDEADLK
        if self._waiters[lock.owner.holder] >= self._most_waiters:
            return errno.ENOLCK
        waiter = _Waiter(place, lock, ticket)
        self._waiting[waiter.key] = waiter
        self._queues.setdefault(place, {})[waiter.key] = waiter
        _count(self._waiters, lock.owner.holder, 1)
        return None

    def _deadlocks(self, place: _Place, lock: Lock) -> bool:
        """Return whether an owner that the lock would wait for itself waits, directly or not, for the lock's
        owner.
        """
        waits: dict[LockOwner, list[_Waiter]] = {}
        for waiter in self._waiting.values():
            if waiter.place[1] is Family.POSIX:
                waits.setdefault(waiter.lock.owner, []).append(waiter)
        reached: set[LockOwner] = set()
        ahead = {held.owner for held in self._conflicts(place, lock)}
        while ahead and lock.owner not in ahead:
            reached |= ahead
            further = [waiter for owner in ahead for waiter in waits.get(owner, ())]
            ahead = {held.owner for w in further for held in self._conflicts(w.place, w.lock)} - reached
        return bool(ahead)

    def _leave(self, waiter: _Waiter) -> None:
        del self._waiting[waiter.key]
        queue = self._queues[waiter.place]
        del queue[waiter.key]
        if not queue:
            del self._queues[waiter.place]
        _count(self._waiters, waiter.lock.owner.holder, -1)

    def _answered(self, waiter: _Waiter, error: int) -> LockAnswer:
        self._leave(waiter)
        return LockAnswer(waiter.lock.owner.holder, waiter.ticket, error, waiter.place[0])

    def _grant_waiters(self, place: _Place) -> tuple[LockAnswer, ...]:
        """Grant waiting requests in order of arrival until no more can be: a granted one may have downgraded
        its owner's lock.
        """
        answers: list[LockAnswer] = []
        before = -1
        while len(answers) > before:
            before = len(answers)
            for waiter in list(self._queues.get(place, {}).values()):
                if not self._blocked(place, waiter.lock):
                    answers.append(self._answered(waiter, self._apply(place, waiter.lock)))
        return tuple(answers)


def replaced(locks: list[Lock], new: Lock) -> list[Lock]:
    """Return one owner's locks of a file after ``new``: sorted, disjoint, adjacent ones of one mode
    merged.
    """
    before, after = [], []
    start, end = new.start, new.end
    for old in locks:
        if old.mode is new.mode and old.start <= new.end + 1 and new.start <= old.end + 1:
            start, end = min(start, old.start), max(end, old.end)
            continue
        if old.start < new.start:
            before.append(old if old.end < new.start else replace(old, end=new.start - 1))
        if old.end > new.end:
            after.append(old if old.start > new.end else replace(old, start=new.end + 1))
    middle = [] if new.mode is Mode.UNLOCK else [replace(new, start=start, end=end)]
    return before + middle + after


def _count(counts: Counter[int], holder: int, more: int) -> None:
    counts[holder] += more
    if not counts[holder]:
        del counts[holder]
