# SPDX-License-Identifier: Apache-2.0
"""Edge: a mount's file locks, which the server holds for it, and their reclaim after the server was restarted
or the mount's lease was over.

The locks that this mount holds are remembered here, so a close sends nothing if there is nothing to unlock. A
lock that somebody else has got meanwhile is lost, and so are an owner's locks of a file if the outcome of one
of its requests is unknown: writes to the file and the owner's locks of it fail with EIO until the owner has
closed it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.connection import is_in_doubt
from millpond.fs.client.session import Session
from millpond.fs.proto import file_locks as r
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.lock_types import Family, HeldLocks, Lock, Mode
from millpond.fs.vfs.path_api import os_error
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
log = logging.getLogger(__name__)
_TRIES = 5


class RemoteLocks:
    """Locking over the session slots of ``session``; ``flush`` sends what is gathered of a file, before each
    request. Threads may call at once.
    """

    def __init__(self, session: Session, flush: Callable[[CachedInode], None]) -> None:
        self._session, self._flush = session, flush
        self._lock, self._reclaiming = threading.Lock(), threading.Lock()
        self._held, self._lost = HeldLocks(), set[tuple[Node, Family, int]]()
        self._epoch, self._serials = 0, itertools.count(1)

    def _ask(self, node: Node, request: Callable[[int], Message], reply: type[R]) -> R:
        """Send the request that is built from the server's number of a file. Raises OSError."""
        file = self._session.inodes.file(node)
        with self._session.call() as call:
            return call.ask(lambda: request(call.remote(file)), reply, idempotent=True)[0]

    def first_conflict(self, node: Node, lock: Lock) -> Lock | None:
        """Return a POSIX lock that conflicts, None if there is none."""
        if lock.mode is Mode.UNLOCK:
            raise os_error(errno.EINVAL)
        self._flush(self._session.inodes.file(node))
        found = self._ask(
            node, lambda file: r.GetLock(file, lock.owner, lock.mode, lock.start, lock.end), r.LockIs
        )
        if found.mode == Mode.UNLOCK:
            return None
        pid = self._held.pid((node, Family.POSIX), found.start, found.end)
        return Lock(0, Mode(found.mode), found.start, found.end, pid)

    def require(self, node: Node) -> None:
        """Raise OSError (EIO) if a lock of the file was lost."""
        if self._lost and any(lost[0] == node for lost in list(self._lost)):
            raise os_error(errno.EIO)

    def lock(self, node: Node, family: Family, lock: Lock) -> int:
        """Lock or unlock. Returns 0, or an errno: EAGAIN if others hold a lock that conflicts."""
        place = node, family
        unlocks = lock.mode is Mode.UNLOCK
        if unlocks and not self._held.of(place, lock.owner):
            return 0
        if not unlocks and (*place, lock.owner) in self._lost:
            return errno.EIO
        try:
            self._flush(self._session.inodes.file(node))
        except OSError:  # whoever closes the file is told of it
            if not unlocks:
                raise
        try:
            error = self._set(node, family, lock)
        except OSError:
            self._give_up(node, family, lock)
            if unlocks:
                return 0
            raise
        if error and family is Family.FLOCK:  # flock(2): changing the mode loses the lock
            with self._lock:
                self._held.put(place, lock.owner, [])
        return error

    def _set(self, node: Node, family: Family, lock: Lock) -> int:
        """Send a lock request until it meets a known epoch, and note the lock. Returns the outcome."""
        for _ in range(_TRIES):
            epoch = self._epoch
            outcome = self._request(epoch, node, family, lock)
            if isinstance(outcome, r.LocksDropped):
                self._reclaim(outcome.epoch)
                continue
            with self._lock:
                if epoch == self._epoch:
                    if not outcome:
                        self._held.add((node, family), lock)
                    return outcome
        raise os_error(errno.EIO)

    def _request(
        self, epoch: int, node: Node, family: Family, lock: Lock, *, reclaim: bool = False
    ) -> int | r.LocksDropped:
        """Send a lock request. Returns the outcome. Raises OSError."""
        flock, serials = family is Family.FLOCK, self._serials

        def request(file: int) -> Message:
            where = lock.start, lock.end
            return r.SetLock(file, epoch, next(serials), flock, lock.owner, lock.mode, *where, reclaim)

        for _ in range(_TRIES):
            reply = self._ask(node, request, r.LockReply)
            if isinstance(reply, r.LocksDropped):
                return reply
            if isinstance(reply, r.LockSet) and reply.error is not None:
                return reply.error
        raise os_error(errno.EIO)

    def release(self, node: Node, family: Family, owner: int) -> None:
        """Release all locks of this owner."""
        place = node, family
        if (*place, owner) in self._lost:
            with self._lock:
                self._lost.discard((*place, owner))
        if before := self._held.of(place, owner):
            self.lock(node, family, Lock(owner, Mode.UNLOCK, pid=before[0].pid))
            with self._lock:
                self._lost.discard((*place, owner))

    def _give_up(self, node: Node, family: Family, lock: Lock) -> None:
        """Have the server release an owner's locks of a file: it is not known which of them it has."""
        with self._lock:
            unlocked = HeldLocks()
            unlocked.put((node, family), lock.owner, self._held.of((node, family), lock.owner))
            unlocked.add((node, family), Lock(lock.owner, Mode.UNLOCK, lock.start, lock.end))
            if lock.mode is not Mode.UNLOCK or len(unlocked):
                self._lose(node, family, lock.owner)
            self._held.put((node, family), lock.owner, [])
        with contextlib.suppress(OSError):  # the kernel has forgotten the file: nobody has it open
            released = (
                self._session.inodes.file(node).inode,
                next(self._serials),
                family is Family.FLOCK,
                lock.owner,
            )
            self._session.post(r.ReleaseLocks(*released), self._session.inodes.verifier)

    def _lose(self, node: Node, family: Family, owner: int) -> None:
        """With the lock: note that an owner has lost locks, if it had any."""
        if self._held.of((node, family), owner):
            log.warning("a file lock was lost: to somebody else, or since the server was not heard")
            self._lost.add((node, family, owner))

    def restore(self) -> None:
        """Reclaim all locks if the server has none of them any more, and tell it once that is done. Raises
        OSError.
        """
        for _ in range(_TRIES):
            with self._session.call() as call:
                reply = call.ask(lambda: r.GetLockEpoch(self._epoch), r.LocksDropped, idempotent=True)[0]
            if reply.epoch == self._epoch:
                return
            self._reclaim(reply.epoch)

    def _reclaim(self, epoch: int) -> None:
        with self._reclaiming:
            if epoch == self._epoch:
                return
            with self._lock:
                held = list(self._held)
            for (node, family), lock in held:
                self._reclaim_one(epoch, Node(node), family, lock)
            with self._lock:
                self._epoch = epoch

    def _reclaim_one(self, epoch: int, node: Node, family: Family, lock: Lock) -> None:
        outcome: int | r.LocksDropped
        try:
            outcome = self._request(epoch, node, family, lock, reclaim=True)
        except OSError as error:
            if is_in_doubt(error):
                raise
            outcome = error.errno or errno.EIO
        if outcome and not isinstance(outcome, r.LocksDropped):
            with self._lock:
                self._lose(node, family, lock.owner)
                self._held.add((node, family), Lock(lock.owner, Mode.UNLOCK, lock.start, lock.end))
