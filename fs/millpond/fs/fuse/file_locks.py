# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): performs the kernel's file lock requests on a tree's locks.

A request that waits for a lock is answered later: a thread asks for it again and again, at once when this
mount releases a lock, as an NFS client does. Meanwhile no other request waits for it or is interrupted with
it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from millpond.fs.fuse import abi
from millpond.fs.fuse.abi import Code, Header
from millpond.fs.fuse.device import FuseDevice
from millpond.fs.vfs.inode_api import Buffer, Locking, Node
from millpond.fs.vfs.lock_types import Family, Lock, Mode, mode_of
from millpond.fs.vfs.operation import Operation, current
from millpond.fs.vfs.path_api import os_error

log = logging.getLogger(__name__)
_FIRST_PAUSE, _MAX_PAUSE = 0.005, 0.2
_MAX_WAITERS = 1024


@dataclass(slots=True)
class _Waiter:
    header: Header
    handle: int
    family: Family
    lock: Lock
    operation: Operation = field(default_factory=Operation)
    is_interrupted: bool = False


class KernelLocks:
    """The file locks of one mount. Threads may call at once."""

    def __init__(self, kernel: FuseDevice, locks: Locking) -> None:
        self._kernel, self._locks = kernel, locks
        self._changed = threading.Condition()
        self._waiting: dict[int, _Waiter] = {}
        self._tried: _Waiter | None = None
        self._locked_by: dict[tuple[int, int], int] = {}  # node and owner: the open file that was used last
        self._pause = _FIRST_PAUSE
        self._thread: threading.Thread | None = None
        self._closed = False

    def close(self) -> None:
        """Answer no more requests: the kernel has gone."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def get(self, header: Header, body: memoryview) -> Sequence[Buffer]:
        """Perform GETLK."""
        asked = abi.parse_lock(body)
        found = self._locks.first_conflict(Node(header.node), _wanted(asked))
        if found is None:
            return [abi.pack_lock(asked.start, asked.end, Mode.UNLOCK, 0)]
        return [abi.pack_lock(found.start, found.end, found.mode, found.pid)]

    def set(self, header: Header, body: memoryview) -> Sequence[Buffer] | None:
        """Perform SETLK and SETLKW. Returns None if the request is answered later. Raises OSError."""
        asked = abi.parse_lock(body)
        family = Family.FLOCK if asked.flock else Family.POSIX
        waiter = _Waiter(header, asked.handle, family, _wanted(asked))
        error = self._try(waiter)
        if error == errno.EAGAIN and header.code is Code.SETLKW:
            self._wait(waiter)
            return None
        if error:
            raise os_error(error)
        return ()

    def _try(self, waiter: _Waiter) -> int:
        error = self._locks.lock(Node(waiter.header.node), waiter.family, waiter.lock)
        if not error and waiter.family is Family.POSIX and waiter.lock.mode is not Mode.UNLOCK:
            self._locked_by[waiter.header.node, waiter.lock.owner] = waiter.handle
        if not error and waiter.lock.mode is not Mode.WRITE:  # it may have released something
            self._look_again()
        return error

    def _wait(self, waiter: _Waiter) -> None:
        with self._changed:
            if len(self._waiting) >= _MAX_WAITERS:
                raise os_error(errno.ENOLCK)
            self._waiting[waiter.header.unique] = waiter
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="file locks", daemon=True)
                self._thread.start()
        self._look_again()

    def _look_again(self) -> None:
        """Ask at once, and soon again, for the locks that are waited for."""
        if self._waiting:
            with self._changed:
                self._pause = _FIRST_PAUSE
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._pause if self._waiting else None)
                self._pause = min(2 * self._pause, _MAX_PAUSE)
                if self._closed:
                    return
                waiting = list(self._waiting.items())
            for ticket, waiter in waiting:
                self._try_again(ticket, waiter)

    def _try_again(self, ticket: int, waiter: _Waiter) -> None:
        with self._changed:
            if ticket not in self._waiting:
                return
            self._tried = waiter
        current.set(waiter.operation)  # so that it can be interrupted
        try:
            error = self._try(waiter)
        except OSError as failure:
            error = failure.errno or errno.EIO
        except Exception:
            log.exception("a file lock could not be asked for")  # others need this thread
            error = errno.EIO
        with self._changed:
            self._tried = None
            if error == errno.EAGAIN and waiter.is_interrupted:
                error = errno.EINTR
            if error != errno.EAGAIN:
                self._answer(ticket, error)

    def interrupt(self, ticket: int) -> None:
        """Interrupt a request that waits for a lock, since its process has received a signal. One that is
        just asked for again is given up only the second time.
        """
        with self._changed:
            waiter = self._waiting.get(ticket)
            if waiter is None or waiter is not self._tried:
                self._answer(ticket, errno.EINTR)
                return
            is_late, waiter.is_interrupted = waiter.is_interrupted, True
        if is_late:
            waiter.operation.interrupt()

    def _answer(self, ticket: int, error: int) -> None:
        """With the mutex: answer a request that waits, unless it has its answer already."""
        waiter = self._waiting.pop(ticket, None)
        if waiter is None or self._closed:
            return
        with contextlib.suppress(OSError):  # the mount has gone
            if error:
                self._kernel.fail(waiter.header, error)
            else:
                self._kernel.reply(waiter.header, ())

    def closed(self, header: Header, body: memoryview) -> Sequence[Buffer]:
        """Perform FLUSH: a descriptor was closed, which releases all POSIX locks of its process on
        the file.
        """
        _, owner = abi.FLUSH.unpack_from(body)
        self._release(header, Family.POSIX, owner)
        self._locked_by.pop((header.node, owner), None)
        return ()

    def released(self, header: Header, body: memoryview) -> None:
        """Perform the lock part of RELEASE: the open file is gone, and with it its flock, if it ever had one,
        and its open file description locks: the kernel unlocks these for no FUSE mount. (A process's locks
        went with FLUSH, unless it has taken them anew by another open file.)
        """
        handle, _, flags, owner = abi.RELEASE.unpack_from(body)
        for place in [place for place, by in list(self._locked_by.items()) if by == handle]:
            self._release(header, Family.POSIX, place[1])
            self._locked_by.pop(place, None)
        if flags & abi.RELEASE_FLOCK_UNLOCK:
            self._release(header, Family.FLOCK, owner)

    def _release(self, header: Header, family: Family, owner: int) -> None:
        self._locks.release(Node(header.node), family, owner)
        self._look_again()


def _wanted(asked: abi.LockBody) -> Lock:
    """Return the lock that a request asks for. Raises OSError: EINVAL."""
    return Lock(asked.owner, mode_of(asked.kind), asked.start, asked.end, asked.pid)
