# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): file locks of one mount whose lock table another process holds, and their reclaim after
that process was restarted.

The locks that this mount holds are remembered here, so a close sends nothing if there is nothing to unlock.
When the server answers that it knows no locks of this mount (any more), a new lock epoch has begun and the
mount reclaims them. If the outcome of a request is unknown the server drops the locks of that file alone. A
lock that somebody else has got meanwhile is lost: its owner's locks of the file, and writes to the file, fail
with EIO until the owner has closed it. After a reclaim, new locks wait for a grace
period in which other mounts reclaim theirs.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from millpond.fs.filelocks.service import LockService
from millpond.fs.filelocks.table import replaced
from millpond.fs.proto import file_locks as r
from millpond.fs.vfs.inode_api import Node, Waiting, WouldBlock, may_block
from millpond.fs.vfs.lock_types import HERE, Family, Lock, LockOwner, Mode
from millpond.fs.vfs.path_api import os_error

log = logging.getLogger(__name__)
_AWAIT_SECONDS = 1.0
_RETRY_SECONDS = 0.3
_GRACE_SECONDS = 5.0
_TRIES = 5
_JOIN_SECONDS = 5.0


Ask = Callable[[Node | None, Callable[[int], r.LockRequest]], r.LockReply]
"""Sends the request that is built from the server's number of a file; returns the reply. Raises OSError and
WouldBlock.
"""


@dataclass(slots=True)
class _Waiter:
    node: Node
    family: Family
    lock: Lock
    then: Callable[[int], None]
    epoch: int


class _GracePeriod(Exception):
    """Raised in the grace period, when others may be about to reclaim their locks."""


class RemoteLocks:
    """Locking over the server that ``ask`` reaches; with ``may_wait``, it waits for each change of locks,
    only in a thread that may block. Threads may call at once.
    """

    def __init__(self, ask: Ask, *, may_wait: bool = False) -> None:
        self._ask, self._may_wait = ask, may_wait
        self._changed, self._reclaiming = threading.Condition(), threading.Lock()
        self._epoch, self._grace_end = 0, 0.0
        self._held: dict[tuple[Node, Family], dict[int, list[Lock]]] = {}
        self._lost: dict[tuple[Node, Family], set[int]] = {}
        self._waiting: dict[int, _Waiter] = {}
        self._requested: set[int] = set()
        self._early_answers: dict[int, int] = {}
        self._diverged: set[Node] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Stop the thread. The server releases what is held."""
        with self._changed:
            self._closed, thread = True, self._thread
            self._changed.notify_all()
        if thread:
            thread.join(_JOIN_SECONDS)

    def first_conflict(self, node: Node, lock: Lock) -> Lock | None:
        """Return the first POSIX lock that conflicts, None if there is none."""
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
        """Raise OSError (EIO) if a lock of the file was lost."""
        if self._lost and ((node, Family.POSIX) in self._lost or (node, Family.FLOCK) in self._lost):
            raise os_error(errno.EIO)

    def lock(self, node: Node, family: Family, lock: Lock, waiting: Waiting | None) -> int | None:
        """Lock or unlock."""
        if lock.mode is Mode.UNLOCK:
            return self._unlock(node, family, lock)
        if lock.owner.number in self._lost.get((node, family), ()):
            return errno.EIO
        ticket = None if waiting is None else waiting.ticket
        with self._expect_answer(ticket):
            try:
                epoch, error = self._set(node, family, lock, ticket)
            except _GracePeriod:
                epoch, error = 0, None
            except OSError:
                self._mark_diverged(node)  # whether the server has done it is unknown
                raise
            if error is None and waiting:
                return self._add_waiter(_Waiter(node, family, lock, waiting.then, epoch), waiting.ticket)
        self._record_outcome(node, family, lock, error)
        return error

    @contextlib.contextmanager
    def _expect_answer(self, ticket: int | None) -> Iterator[None]:
        """Accept answers to this ticket that arrive before the request's own reply."""
        if ticket is None:
            yield
            return
        with self._changed:
            self._requested.add(ticket)
        try:
            yield
        finally:
            with self._changed:
                self._requested.discard(ticket)
                self._early_answers.pop(ticket, None)

    def _set(self, node: Node, family: Family, lock: Lock, ticket: int | None) -> tuple[int, int | None]:
        """Send a lock request until it meets a known epoch. Returns that epoch, and the outcome."""
        for _ in range(_TRIES):
            self._await_grace_period(ticket)
            epoch = self._epoch
            reply = self._ask(node, _set_lock(epoch, family, lock, ticket))
            if isinstance(reply, r.LockSet) and (reply.error is not None or ticket is not None):
                return epoch, reply.error
            if not isinstance(reply, r.Regain):
                break
            self._reclaim(reply.epoch)
        raise os_error(errno.EIO)

    def _await_grace_period(self, ticket: int | None) -> None:
        """Wait for the end of the grace period. Raises _GracePeriod for a request that has a ticket, and
        WouldBlock.
        """
        left = self._grace_end - time.monotonic()
        if left <= 0:
            return
        if ticket is not None:
            raise _GracePeriod
        if not may_block.get():
            raise WouldBlock
        time.sleep(left)

    def _add_waiter(self, waiter: _Waiter, ticket: int) -> int | None:
        with self._changed:
            error = self._early_answers.pop(ticket, None)
            if error is None:
                self._waiting[ticket] = waiter
                if waiter.family is Family.FLOCK:  # flock(2): changing the mode loses the lock
                    self._set_held(waiter.node, waiter.family, waiter.lock.owner.number, [])
                self._wake_thread()
                return None
        self._record_outcome(waiter.node, waiter.family, waiter.lock, error)
        return error

    def _record_outcome(self, node: Node, family: Family, lock: Lock, error: int | None) -> None:
        """Update the owner's locks after an answer."""
        number = lock.owner.number
        with self._changed:
            before = self._held.get((node, family), {}).get(number, [])
            if error == 0:
                self._set_held(node, family, number, replaced(before, lock))
            elif family is Family.FLOCK:
                self._set_held(node, family, number, [])
            self._wake_thread()

    def _set_held(self, node: Node, family: Family, number: int, locks: list[Lock]) -> None:
        owners = self._held.setdefault((node, family), {})
        if locks:
            owners[number] = locks
        else:
            owners.pop(number, None)
        if not owners:
            del self._held[node, family]

    def _unlock(self, node: Node, family: Family, lock: Lock) -> int:
        number = lock.owner.number
        with self._changed:
            before = self._held.get((node, family), {}).get(number)
            if before is None:
                return 0
            self._require_waiting()
            self._set_held(node, family, number, replaced(before, lock))
            epoch = self._epoch
        with self._restored_unless_sent(node, family, number, before):
            self._notify_server(node, _set_lock(epoch, family, lock, None))
        return 0

    def _require_waiting(self) -> None:
        """Raise WouldBlock before anything is changed, if the request would not be sent by this thread."""
        if self._may_wait and not may_block.get():
            raise WouldBlock

    @contextlib.contextmanager
    def _restored_unless_sent(
        self, node: Node, family: Family, number: int, before: list[Lock]
    ) -> Iterator[None]:
        """Restore the owner's locks on WouldBlock: another thread will unlock them."""
        try:
            yield
        except WouldBlock:
            with self._changed:
                self._set_held(node, family, number, before)
            raise

    def _notify_server(self, node: Node, request: Callable[[int], r.LockRequest]) -> None:
        """Send an unlock that is already done here; if it fails, the file's locks are dropped and reclaimed.
        Raises WouldBlock.
        """
        try:
            reply = self._ask(node, request)
        except OSError:
            self._mark_diverged(node)
            return
        if reply != r.LockSet(0):  # also if the lock was being reclaimed meanwhile
            self._mark_diverged(node)

    def release(self, node: Node, family: Family, owner: int) -> None:
        """Release all locks of this owner. Raises WouldBlock."""
        if not (self._held or self._lost):
            return
        place = (node, family)
        if place not in self._held and place not in self._lost:
            return
        with self._changed:
            self._lost.get(place, set()).discard(owner)
            if not self._lost.get(place, True):
                del self._lost[place]
            before = self._held.get(place, {}).get(owner)
            if before is None:
                return
            self._require_waiting()
            self._set_held(node, family, owner, [])
            epoch = self._epoch
        with self._restored_unless_sent(node, family, owner, before):
            self._notify_server(node, lambda file: r.ReleaseLocks(file, epoch, family is Family.FLOCK, owner))

    def cancel(self, ticket: int) -> None:
        """Cancel a waiting request. Raises WouldBlock."""
        with self._changed:
            waiter, epoch = self._waiting.get(ticket), self._epoch
        if waiter is None:
            return
        try:
            reply = self._ask(None, lambda _: r.CancelLock(epoch, ticket))
        except OSError:
            self._mark_diverged(waiter.node)  # the server may grant the lock yet
            reply = r.LockSet(0)
        has_its_answer = isinstance(reply, r.LockSet) and bool(reply.error) and waiter.epoch == epoch
        if not has_its_answer:
            self._finish(ticket, errno.EINTR)

    def _finish(self, ticket: int, error: int) -> None:
        with self._changed:
            waiter = self._waiting.pop(ticket, None)
            if waiter is None:  # if it has been given up, its file's locks are about to be dropped
                if ticket in self._requested:
                    self._early_answers[ticket] = error
                return
            if error != errno.EINTR:
                self._record_outcome(waiter.node, waiter.family, waiter.lock, error)
        waiter.then(error)

    def _mark_diverged(self, node: Node) -> None:
        """Note that the server's locks of a file may differ from those here: they are to be dropped and
        reclaimed.
        """
        with self._changed:
            self._diverged.add(node)
            self._wake_thread()

    def _wake_thread(self) -> None:
        """Wake the thread, or start it; with the mutex held."""
        self._changed.notify_all()
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="file locks", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._diverged or self._held or self._waiting)
                if self._closed:
                    return
            try:
                self._poll_answers()
            except OSError as error:
                log.debug("no reply about file locks from the server: %s", error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _RETRY_SECONDS)

    def _poll_answers(self) -> None:
        """Poll for the answers of waiting requests and for a new lock epoch; repair what has diverged."""
        for node in list(self._diverged):
            self._repair(node)
        left = self._grace_end - time.monotonic()
        if left <= 0:
            self._retry_waiters()
        epoch, seconds = self._epoch, min(_AWAIT_SECONDS, left) if left > 0 else _AWAIT_SECONDS
        reply = self._ask(None, lambda _: r.AwaitLocks(epoch, seconds))
        if isinstance(reply, r.Regain):
            self._reclaim(reply.epoch)
        elif isinstance(reply, r.LocksAnswered):
            for ticket, error in zip(reply.tickets, reply.errors, strict=False):
                self._finish(ticket, error)

    def _repair(self, node: Node) -> None:
        """Have the server drop this mount's locks of a file, and reclaim those that are known here."""
        with self._reclaiming:
            self._diverged.discard(node)
            try:
                reply = self._drop_file(node, self._epoch)
                if isinstance(reply, r.LockEpochBegun):
                    self._begin_epoch(reply.epoch, node)
                elif isinstance(reply, r.Regain):
                    self._diverged.add(node)  # the reply to an earlier drop may have been lost
                    self._begin_epoch(reply.epoch)
            except OSError:
                self._diverged.add(node)
                raise

    def _drop_file(self, node: Node, epoch: int) -> r.LockReply:
        """Have the server drop the locks of a file, or all locks of this mount if the file is gone."""
        try:
            return self._ask(node, lambda file: r.DropFileLocks(file, epoch))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        return self._ask(None, lambda _: r.DropLocks(epoch))

    def _retry_waiters(self) -> None:
        """Send again the requests that waited in an earlier epoch."""
        with self._changed:
            late = [(ticket, each) for ticket, each in self._waiting.items() if each.epoch != self._epoch]
        for ticket, waiter in late:
            try:
                epoch, error = self._set(waiter.node, waiter.family, waiter.lock, ticket)
            except _GracePeriod:
                return
            if error is None:
                waiter.epoch = epoch
            else:
                self._finish(ticket, error)

    def _reclaim(self, epoch: int) -> None:
        """Ask again for all locks held here: in this epoch the server has none of them."""
        with self._reclaiming:
            if self._epoch != epoch:
                self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int, only: Node | None = None) -> None:
        """Ask again, in this epoch, for all locks held here, or those of one file ``only``."""
        with self._changed:
            held = [
                (node, family, lock)
                for (node, family), owners in self._held.items()
                if only in (None, node)
                for locks in owners.values()
                for lock in locks
            ]
        for node, family, lock in held:
            try:
                reply = self._ask(node, _set_lock(epoch, family, lock, None))
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                reply = r.LockSet(error.errno)
            if not isinstance(reply, r.LockSet):
                return  # yet another epoch has begun
            if reply.error:
                self._lose(node, family, lock)
        if self._epoch and only is None:  # other mounts may have locks to reclaim, too
            self._grace_end = time.monotonic() + _GRACE_SECONDS
        self._epoch = epoch

    def _lose(self, node: Node, family: Family, lock: Lock) -> None:
        log.warning(
            "a file lock was lost to somebody else while its server was away, or this mount stood still"
        )
        with self._changed:
            before = self._held.get((node, family), {}).get(lock.owner.number)
            if before is None:  # unlocked meanwhile
                return
            gap = replace(lock, mode=Mode.UNLOCK)
            self._set_held(node, family, lock.owner.number, replaced(before, gap))
            self._lost.setdefault((node, family), set()).add(lock.owner.number)


def own_locks() -> RemoteLocks:
    """Return the file locks of a mount whose files nobody else serves: with a lock table in this process."""
    service = LockService(lambda _holder: False)
    return RemoteLocks(lambda node, request: service.perform(HERE, node or 0, request(node or 0)))


def _set_lock(epoch: int, family: Family, lock: Lock, ticket: int | None) -> Callable[[int], r.LockRequest]:
    flock, number = family is Family.FLOCK, lock.owner.number
    return lambda file: r.SetLock(
        file, epoch, flock, number, lock.mode, lock.start, lock.end, lock.pid, ticket
    )
