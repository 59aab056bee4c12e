# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): file locks of files that only this process serves, and routing between these and shared
ones.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable

from millpond.fs.filelocks.table import LockAnswer, LockTable
from millpond.fs.vfs.inode_api import Locking, Node, Waiting
from millpond.fs.vfs.lock_types import HERE, Family, Lock, LockOwner


class LocalLocks:
    """Locking with a lock table of its own. Threads may call at once."""

    def __init__(self) -> None:
        self._table, self._lock = LockTable(), threading.Lock()
        self._waiting: dict[int, Callable[[int], None]] = {}

    def first_conflict(self, node: Node, lock: Lock) -> Lock | None:
        """Return the first POSIX lock that conflicts, None if there is none."""
        with self._lock:
            return self._table.getlk(node, lock)

    def lock(self, node: Node, family: Family, lock: Lock, waiting: Waiting | None) -> int | None:
        """Lock or unlock."""
        with self._lock:
            outcome = self._table.setlk(node, family, lock, waiting.ticket if waiting else None)
            if waiting and outcome.error is None:
                self._waiting[waiting.ticket] = waiting.then
        self._answer_waiters(outcome.answers)
        return outcome.error

    def cancel(self, ticket: int) -> None:
        """Cancel a waiting request."""
        with self._lock:
            cancelled = self._table.cancel(HERE, ticket)
        if cancelled:
            self._answer_waiters([LockAnswer(HERE, ticket, errno.EINTR)])

    def release(self, node: Node, family: Family, owner: int) -> None:
        """Release all locks of this owner."""
        with self._lock:
            answers = self._table.release(node, family, LockOwner(HERE, owner))
        self._answer_waiters(answers)

    def require(self, _node: Node) -> None:
        """Do nothing: no local lock is ever lost."""

    def _answer_waiters(self, answers: Iterable[LockAnswer]) -> None:
        """Call the waiters, without the mutex, since they may make new requests."""
        for answer in answers:
            with self._lock:
                then = self._waiting.pop(answer.ticket)
            then(answer.error)


class RoutedLocks:
    """Locking that uses ``shared`` for the files that ``is_shared``, ``own`` for all others."""

    def __init__(self, is_shared: Callable[[Node], bool], shared: Locking, own: Locking) -> None:
        self._is_shared, self._shared, self._own = is_shared, shared, own

    def _of(self, node: Node) -> Locking:
        return self._shared if self._is_shared(node) else self._own

    def first_conflict(self, node: Node, lock: Lock) -> Lock | None:
        """Return the first POSIX lock that conflicts, None if there is none."""
        return self._of(node).first_conflict(node, lock)

    def lock(self, node: Node, family: Family, lock: Lock, waiting: Waiting | None) -> int | None:
        """Lock or unlock."""
        return self._of(node).lock(node, family, lock, waiting)

    def cancel(self, ticket: int) -> None:
        """Cancel a waiting request."""
        self._own.cancel(ticket)
        self._shared.cancel(ticket)

    def release(self, node: Node, family: Family, owner: int) -> None:
        """Release all locks of this owner."""
        self._of(node).release(node, family, owner)

    def require(self, node: Node) -> None:
        """Raise OSError (EIO) if a lock of the file was lost."""
        self._of(node).require(node)
