"""Edge (threads): the file locks of files that nobody shares with this process, beside those of others."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable

from millpond.fs.filelocks.table import LockAnswer, LockTable
from millpond.fs.vfs.inode_api import Locking, Node, Waiting
from millpond.fs.vfs.lock_types import HERE, Family, Lock, LockOwner


class LocalLocks:
    """A Locking with a table of its own. Threads may call at once."""

    def __init__(self) -> None:
        self._table, self._lock = LockTable(), threading.Lock()
        self._waiting: dict[int, Callable[[int], None]] = {}

    def in_the_way(self, node: Node, lock: Lock) -> Lock | None:
        """The first POSIX lock in the way."""
        with self._lock:
            return self._table.getlk(node, lock)

    def lock(self, node: Node, family: Family, lock: Lock, waiting: Waiting | None) -> int | None:
        """Lock or unlock."""
        with self._lock:
            outcome = self._table.setlk(node, family, lock, waiting.ticket if waiting else None)
            if waiting and outcome.error is None:
                self._waiting[waiting.ticket] = waiting.then
        self._tell(outcome.answers)
        return outcome.error

    def cancel(self, ticket: int) -> None:
        """It shall wait no longer."""
        with self._lock:
            cancelled = self._table.cancel(HERE, ticket)
        if cancelled:
            self._tell([LockAnswer(HERE, ticket, errno.EINTR)])

    def release(self, node: Node, family: Family, owner: int) -> None:
        """Unlock all that this owner has."""
        with self._lock:
            answers = self._table.release(node, family, LockOwner(HERE, owner))
        self._tell(answers)

    def require(self, _node: Node) -> None:
        """No lock is ever lost."""

    def _tell(self, answers: Iterable[LockAnswer]) -> None:
        """Without the lock: who is told may ask for more."""
        for answer in answers:
            with self._lock:
                then = self._waiting.pop(answer.ticket)
            then(answer.error)


class RoutedLocks:
    """``shared`` for what ``is_shared``, ``own`` for all other files."""

    def __init__(self, is_shared: Callable[[Node], bool], shared: Locking, own: Locking) -> None:
        self._is_shared, self._shared, self._own = is_shared, shared, own

    def _of(self, node: Node) -> Locking:
        return self._shared if self._is_shared(node) else self._own

    def in_the_way(self, node: Node, lock: Lock) -> Lock | None:
        """The first POSIX lock in the way."""
        return self._of(node).in_the_way(node, lock)

    def lock(self, node: Node, family: Family, lock: Lock, waiting: Waiting | None) -> int | None:
        """Lock or unlock."""
        return self._of(node).lock(node, family, lock, waiting)

    def cancel(self, ticket: int) -> None:
        """It shall wait no longer."""
        self._own.cancel(ticket)
        self._shared.cancel(ticket)

    def release(self, node: Node, family: Family, owner: int) -> None:
        """Unlock all that this owner has."""
        self._of(node).release(node, family, owner)

    def require(self, node: Node) -> None:
        """Raises OSError: EIO if a lock of it was lost."""
        self._of(node).require(node)
