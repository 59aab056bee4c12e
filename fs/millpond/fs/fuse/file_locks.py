# SPDX-License-Identifier: Apache-2.0
"""Edge: performs the kernel's file lock requests on a tree's locks.

A request that waits for a lock is answered later; meanwhile no other request waits for it or is interrupted
with it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence

from millpond.fs.fuse import abi
from millpond.fs.fuse.abi import Code, Header
from millpond.fs.fuse.device import FuseDevice
from millpond.fs.vfs.inode_api import Buffer, Locking, Node, Waiting
from millpond.fs.vfs.lock_types import HERE, Family, Lock, LockOwner, Mode, mode_of
from millpond.fs.vfs.path_api import os_error


class KernelLocks:
    """The file locks of one mount. Threads may call at once."""

    def __init__(self, kernel: FuseDevice, locks: Locking) -> None:
        self._kernel, self._locks = kernel, locks
        self._lock = threading.Lock()
        self._asking: set[int] = set()
        self._interrupted: set[int] = set()
        self._closed = False

    def close(self) -> None:
        """Answer no more requests: the kernel has gone."""
        with self._lock:
            self._closed = True

    def get(self, header: Header, body: memoryview) -> Sequence[Buffer]:
        """Perform GETLK."""
        asked = abi.parse_lock(body)
        found = self._locks.first_conflict(Node(header.node), _wanted(asked))
        if found is None:
            return [abi.pack_lock(asked.start, asked.end, Mode.UNLOCK, 0)]
        return [abi.pack_lock(found.start, found.end, found.mode, found.pid)]

    def set(self, header: Header, body: memoryview) -> Sequence[Buffer] | None:
        """Perform SETLK and SETLKW. Returns None if the request is answered later. Raises OSError and
        WouldBlock.
        """
        asked, ticket = abi.parse_lock(body), header.unique
        family = Family.FLOCK if asked.flock else Family.POSIX
        waiting = None
        if header.code is Code.SETLKW:
            waiting = Waiting(ticket, functools.partial(self._answer, header))
            with self._lock:
                self._asking.add(ticket)
        try:
            error = self._locks.lock(Node(header.node), family, _wanted(asked), waiting)
        except OSError:
            self._was_interrupted(ticket)
            raise
        interrupted = self._was_interrupted(ticket)
        if error is None:
            if interrupted:
                self._locks.cancel(ticket)
            return None
        if error:
            raise os_error(error)
        return ()

    def _was_interrupted(self, ticket: int) -> bool:
        """Return whether the kernel has interrupted a lock request while it was being performed."""
        with self._lock:
            self._asking.discard(ticket)
            interrupted = ticket in self._interrupted
            self._interrupted.discard(ticket)
            return interrupted

    def _answer(self, header: Header, error: int) -> None:
        with self._lock, contextlib.suppress(OSError):  # the mount has gone
            if self._closed:
                return
            if error:
                self._kernel.fail(header, error)
            else:
                self._kernel.reply(header, ())

    def interrupt(self, ticket: int) -> None:
        """Interrupt a request that waits for a lock, since its process has received a signal."""
        with self._lock:
            if ticket in self._asking:  # another thread is performing it and checks this set
                self._interrupted.add(ticket)
                return
        self._locks.cancel(ticket)

    def closed(self, header: Header, body: memoryview) -> Sequence[Buffer]:
        """Perform FLUSH: a descriptor was closed, which releases all POSIX locks of its process on
        the file.
        """
        _, owner = abi.FLUSH.unpack_from(body)
        self._locks.release(Node(header.node), Family.POSIX, owner)
        return ()

    def released(self, header: Header, body: memoryview) -> None:
        """Perform the lock part of RELEASE: the open file is gone, and with it its flock, if it
        ever had one.
        """
        _, _, flags, owner = abi.RELEASE.unpack_from(body)
        if flags & abi.RELEASE_FLOCK_UNLOCK:
            self._locks.release(Node(header.node), Family.FLOCK, owner)


def _wanted(asked: abi.LockBody) -> Lock:
    """Return the lock that a request asks for. Raises OSError: EINVAL."""
    return Lock(LockOwner(HERE, asked.owner), mode_of(asked.kind), asked.start, asked.end, asked.pid)
