"""Edge (a thread): the file locks of one mount whose table another process has, and what becomes of them when
that process forgets them.

What this mount holds is remembered here. So a close asks nobody if there is nothing to unlock; and when the
server says that it knows of no locks of this mount (any more), they are asked for again. One that somebody
else has got meanwhile is lost: its owner's locks of the file, and writes to it, fail with EIO from then on,
until the owner has closed it. Who asks again asks for nothing new for a while: others have to ask again, too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from millpond.fs.filelocks.table import replaced
from millpond.fs.proto import file_locks as r
from millpond.fs.vfs.inode_api import Node, Waiting, WouldBlock, may_block
from millpond.fs.vfs.lock_types import HERE, Family, Lock, LockOwner, Mode
from millpond.fs.vfs.path_api import os_error

if TYPE_CHECKING:  # the device's own mount has no lanes
    pass

log = logging.getLogger(__name__)
_AWAIT_SECONDS = 1.0
_AGAIN_SECONDS = 0.3
_GRACE_SECONDS = 5.0
_TRIES = 5
_JOIN_SECONDS = 5.0


class Asks(Protocol):
    """The way to the server."""

    def __call__(self, node: Node | None, request: Callable[[int], r.LockRequest]) -> r.LockReply:
        """The reply to what is made of the number by which the server knows the file. Raises OSError and
        WouldWait.
        """


@dataclass(slots=True)
class _Waiter:
    node: Node
    family: Family
    lock: Lock
    then: Callable[[int], None]
    era: int


class _Later(Exception):
    """Others may be about to ask for what was theirs."""


class RemoteLocks:
    """A Locking over what ``ask`` reaches. Threads may call at once."""

    def __init__(self, ask: Asks) -> None:
        self._ask = ask
        self._moved, self._regaining = threading.Condition(), threading.Lock()
        self._era, self._free_at = 0, 0.0
        self._held: dict[tuple[Node, Family], dict[int, list[Lock]]] = {}
        self._lost: dict[tuple[Node, Family], set[int]] = {}
        self._waiting: dict[int, _Waiter] = {}
        self._asking: set[int] = set()
        self._early: dict[int, int] = {}
        self._astray = self._closed = False
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Ask nobody any more. What is held is the server's to end."""
        with self._moved:
            self._closed, thread = True, self._thread
            self._moved.notify_all()
        if thread:
            thread.join(_JOIN_SECONDS)

    def in_the_way(self, node: Node, lock: Lock) -> Lock | None:
        """The first POSIX lock in the way."""
        if lock.mode is Mode.UNLOCK:
            raise os_error(errno.EINVAL)
        number = lock.owner.number
        found = self._ask(node, lambda file: r.GetLock(file, number, lock.mode, lock.start, lock.end))
        if not isinstance(found, r.LockIs):
            raise os_error(errno.EIO)
        if found.mode == Mode.UNLOCK:
            return None
        return Lock(LockOwner(HERE, 0), Mode(found.mode), found.start, found.end, found.pid)

    def require(self, node: Node) -> None:
        """Raises OSError: EIO if a lock of it was lost."""
        if self._lost and ((node, Family.POSIX) in self._lost or (node, Family.FLOCK) in self._lost):
            raise os_error(errno.EIO)

    def lock(self, node: Node, family: Family, lock: Lock, waiting: Waiting | None) -> int | None:
        """Lock or unlock."""
        if lock.mode is Mode.UNLOCK:
            return self._unlock(node, family, lock)
        if lock.owner.number in self._lost.get((node, family), ()):
            return errno.EIO
        ticket = None if waiting is None else waiting.ticket
        with self._expecting(ticket):
            try:
                era, error = self._set(node, family, lock, ticket)
            except _Later:
                era, error = 0, None
            except OSError:
                self._go_astray()  # nobody knows whether it was done
                raise
            if error is None and waiting:
                return self._waits(_Waiter(node, family, lock, waiting.then, era), waiting.ticket)
        self._note(node, family, lock, error)
        return error

    @contextlib.contextmanager
    def _expecting(self, ticket: int | None) -> Iterator[None]:
        """Its answer may come before it is known that there will be one."""
        if ticket is None:
            yield
            return
        with self._moved:
            self._asking.add(ticket)
        try:
            yield
        finally:
            with self._moved:
                self._asking.discard(ticket)
                self._early.pop(ticket, None)

    def _set(self, node: Node, family: Family, lock: Lock, ticket: int | None) -> tuple[int, int | None]:
        """In which era it was done, and its outcome."""
        for _ in range(_TRIES):
            self._let_others_ask_again(ticket)
            era = self._era
            reply = self._ask(node, _setting(era, family, lock, ticket))
            if isinstance(reply, r.LockSet) and (reply.error is not None or ticket is not None):
                return era, reply.error
            if not isinstance(reply, r.Regain):
                break
            self._regain(reply.era)
        raise os_error(errno.EIO)

    def _let_others_ask_again(self, ticket: int | None) -> None:
        """Raises _Later for who is answered later in any case, and WouldWait."""
        left = self._free_at - time.monotonic()
        if left <= 0:
            return
        if ticket is not None:
            raise _Later
        if not may_block.get():
            raise WouldBlock
        time.sleep(left)

    def _waits(self, waiter: _Waiter, ticket: int) -> int | None:
        with self._moved:
            error = self._early.pop(ticket, None)
            if error is None:
                self._waiting[ticket] = waiter
                if waiter.family is Family.FLOCK:  # changing the mode has lost the lock
                    self._remember(waiter.node, waiter.family, waiter.lock.owner.number, [])
                self._started()
                return None
        self._note(waiter.node, waiter.family, waiter.lock, error)
        return error

    def _note(self, node: Node, family: Family, lock: Lock, error: int | None) -> None:
        """What the owner has after an answer."""
        number = lock.owner.number
        with self._moved:
            before = self._held.get((node, family), {}).get(number, [])
            if error == 0:
                self._remember(node, family, number, replaced(before, lock))
            elif family is Family.FLOCK:
                self._remember(node, family, number, [])
            self._started()

    def _remember(self, node: Node, family: Family, number: int, locks: list[Lock]) -> None:
        owners = self._held.setdefault((node, family), {})
        if locks:
            owners[number] = locks
        else:
            owners.pop(number, None)
        if not owners:
            del self._held[node, family]

    def _unlock(self, node: Node, family: Family, lock: Lock) -> int:
        number = lock.owner.number
        with self._moved:
            before = self._held.get((node, family), {}).get(number)
            if before is None:
                return 0
            self._remember(node, family, number, replaced(before, lock))
            era = self._era
        self._told(node, _setting(era, family, lock, None))
        return 0

    def _told(self, node: Node, request: Callable[[int], r.LockRequest]) -> None:
        """The server shall do what is done here already; if it did not, it begins anew with what is here."""
        try:
            reply = self._ask(node, request)
        except (OSError, WouldBlock):
            self._go_astray()
            return
        if reply != r.LockSet(0):  # also if it was being asked for again meanwhile
            self._go_astray()

    def release(self, node: Node, family: Family, owner: int) -> None:
        """Unlock all that this owner has."""
        if not (self._held or self._lost):
            return
        place = (node, family)
        if place not in self._held and place not in self._lost:
            return
        with self._moved:
            self._lost.get(place, set()).discard(owner)
            if not self._lost.get(place, True):
                del self._lost[place]
            if owner not in self._held.get(place, ()):
                return
            self._remember(node, family, owner, [])
            era = self._era
        self._told(node, lambda file: r.ReleaseLocks(file, era, family is Family.FLOCK, owner))

    def cancel(self, ticket: int) -> None:
        """It shall wait no longer."""
        with self._moved:
            waiter, era = self._waiting.get(ticket), self._era
        if waiter is None:
            return
        try:
            reply = self._ask(None, lambda _: r.CancelLock(era, ticket))
        except (OSError, WouldBlock):
            self._go_astray()  # it may get the lock yet
            reply = r.LockSet(0)
        has_its_answer = isinstance(reply, r.LockSet) and bool(reply.error) and waiter.era == era
        if not has_its_answer:
            self._finish(ticket, errno.EINTR)

    def _finish(self, ticket: int, error: int) -> None:
        with self._moved:
            waiter = self._waiting.pop(ticket, None)
            if waiter is None:
                if ticket in self._asking:
                    self._early[ticket] = error
                elif not error:  # nobody waits for it any more
                    self._astray = True
                return
            if error != errno.EINTR:
                self._note(waiter.node, waiter.family, waiter.lock, error)
        waiter.then(error)

    def _go_astray(self) -> None:
        """Nobody knows what the server has."""
        with self._moved:
            self._astray = True
            self._started()

    def _started(self) -> None:
        """With the lock: the thread runs as long as there is anything for it to see to."""
        self._moved.notify_all()
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="file locks", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._closed or self._astray or self._held or self._waiting)
                if self._closed:
                    return
            try:
                self._hear()
            except OSError as error:
                log.debug("the server says nothing of file locks: %s", error)
                with self._moved:
                    self._moved.wait_for(lambda: self._closed, _AGAIN_SECONDS)

    def _hear(self) -> None:
        """What has become of those who wait, and of what is held."""
        if self._astray:
            self._drop()
        left = self._free_at - time.monotonic()
        if left <= 0:
            self._ask_again()
        era, seconds = self._era, min(_AWAIT_SECONDS, left) if left > 0 else _AWAIT_SECONDS
        reply = self._ask(None, lambda _: r.AwaitLocks(era, seconds))
        if isinstance(reply, r.Regain):
            self._regain(reply.era)
        elif isinstance(reply, r.LocksAnswered):
            for ticket, error in zip(reply.tickets, reply.errors, strict=False):
                self._finish(ticket, error)

    def _drop(self) -> None:
        """Have the server forget this mount's locks, in whatever era, so that it is told anew."""
        with self._regaining:
            self._astray, era = False, self._era
            try:
                reply = self._ask(None, lambda _: r.DropLocks(era))
                if isinstance(reply, r.Regain):
                    era = reply.era
                    self._ask(None, lambda _: r.DropLocks(era))
            except OSError:
                self._astray = True
                raise

    def _ask_again(self) -> None:
        """For what waited in an era that has ended."""
        with self._moved:
            late = [(ticket, each) for ticket, each in self._waiting.items() if each.era != self._era]
        for ticket, waiter in late:
            try:
                era, error = self._set(waiter.node, waiter.family, waiter.lock, ticket)
            except _Later:
                return
            if error is None:
                waiter.era = era
            else:
                self._finish(ticket, error)

    def _regain(self, era: int) -> None:
        """The server has none of this mount's locks, in this era of its: ask for them again."""
        with self._regaining:
            if self._era == era:
                return
            with self._moved:
                held = [
                    (node, family, lock)
                    for (node, family), owners in self._held.items()
                    for locks in owners.values()
                    for lock in locks
                ]
            for node, family, lock in held:
                try:
                    reply = self._ask(node, _setting(era, family, lock, None))
                except FileNotFoundError:
                    reply = r.LockSet(errno.ENOENT)
                except OSError as error:
                    if error.errno != errno.ESTALE:
                        raise
                    reply = r.LockSet(errno.ESTALE)
                if not isinstance(reply, r.LockSet):
                    return  # one more era has begun
                if reply.error:
                    self._lose(node, family, lock)
            if self._era:  # there were others, too, perhaps
                self._free_at = time.monotonic() + _GRACE_SECONDS
            self._era = era

    def _lose(self, node: Node, family: Family, lock: Lock) -> None:
        log.warning(
            "a file lock was lost to somebody else while its server was away, or this mount stood still"
        )
        with self._moved:
            before = self._held.get((node, family), {}).get(lock.owner.number)
            if before is None:  # it was unlocked meanwhile
                return
            gap = replace(lock, mode=Mode.UNLOCK)
            self._remember(node, family, lock.owner.number, replaced(before, gap))
            self._lost.setdefault((node, family), set()).add(lock.owner.number)


def _setting(era: int, family: Family, lock: Lock, ticket: int | None) -> Callable[[int], r.LockRequest]:
    flock, number = family is Family.FLOCK, lock.owner.number
    return lambda file: r.SetLock(file, era, flock, number, lock.mode, lock.start, lock.end, lock.pid, ticket)
