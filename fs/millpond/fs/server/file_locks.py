# SPDX-License-Identifier: Apache-2.0
"""Edge: the file locks of one client of a volume."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from millpond.fs.proto import file_locks as r
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.file_locks import FileLocks
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.lock_types import Family, Lock, Mode, mode_of
from millpond.fs.vfs.path_api import within
from millpond.wire.messages import Message

_OWNERS = (1 << 64) - 1


class ClientLocks:
    """The locks of one client. ``before`` is called before a lock is taken, unless it is reclaimed. Threads
    may call at once.
    """

    def __init__(self, tree: BackingFs, before: Callable[[], None]) -> None:
        self._locks, self._before = FileLocks(tree), before
        self._lock = threading.Lock()
        self._epoch, self._least = _new_epoch(), 0

    def drop(self) -> None:
        """Release all: the client's lease has expired, or its session has ended."""
        with self._lock:
            self._locks.close()
            self._epoch = _new_epoch()

    def epoch(self) -> r.LocksDropped:
        """Return the epoch that began when all locks were released last."""
        return r.LocksDropped(self._epoch)

    def get(self, node: Node, request: r.GetLock) -> r.LockIs:
        """Perform a GetLock. Raises OSError."""
        found = self._locks.first_conflict(node, _lock(request))
        return r.LockIs(found.mode, found.start, found.end) if found else r.LockIs(Mode.UNLOCK)

    def set(self, node: Node, request: r.SetLock) -> Message:
        """Perform a SetLock. Raises OSError."""
        lock = _lock(request)
        if not request.reclaim and lock.mode is not Mode.UNLOCK:
            self._before()
        with self._lock:
            if request.epoch != self._epoch:
                return self.epoch()
            if request.serial < self._least:
                return r.LockSet(None)
            return r.LockSet(self._locks.lock(node, _family(request.flock), lock))

    def release(self, request: r.ReleaseLocks) -> None:
        """Perform a ReleaseLocks, and no earlier request after it."""
        with self._lock:
            self._least = max(self._least, request.serial)
            self._locks.release_file(request.inode, _family(request.flock), request.owner)


def _new_epoch() -> int:
    return int.from_bytes(os.urandom(6)) + 1


def _family(flock: bool) -> Family:
    return Family.FLOCK if flock else Family.POSIX


def _lock(request: r.GetLock | r.SetLock) -> Lock:
    """Return the lock of a request. Raises OSError: EINVAL for values that no lock can have."""
    return Lock(within(request.owner, 0, _OWNERS), mode_of(request.mode), request.start, request.end)
