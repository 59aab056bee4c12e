# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread, the clock): interrupts requests whose programs have received a signal (FUSE_INTERRUPT).

A local file system does not fail with EINTR, and few programs expect it: a request whose reply comes soon
after the signal is not interrupted at all. One that still waits then fails, so that Ctrl-C and SIGKILL end a
program whatever the other side does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from millpond.fs.vfs.operation import Operation

log = logging.getLogger(__name__)
_GRACE_SECONDS = 1.0


class Interrupts:
    """The requests of one mount that are under way, by the kernel's numbers. Threads may call at once.

    ``cancel_lock`` cancels a request that waits for a file lock, if it is one: such a wait is interrupted at
    once, as it is on a local file system.
    """

    def __init__(self, cancel_lock: Callable[[int], None]) -> None:
        self._cancel_lock = cancel_lock
        self._under_way: dict[int, Operation] = {}
        self._now: deque[int] = deque()
        self._due: deque[tuple[float, int]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, unique: int, operation: Operation) -> None:
        """Add a request that has come."""
        self._under_way[unique] = operation

    def remove(self, unique: int) -> None:
        """Remove a request that is answered, or is going to be in another way."""
        self._under_way.pop(unique, None)

    def request(self, unique: int) -> None:
        """Interrupt a request, unless it is answered soon."""
        with self._changed:
            self._now.append(unique)
            self._due.append((time.monotonic() + _GRACE_SECONDS, unique))
            self._changed.notify_all()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="interrupts", daemon=True)
                self._thread.start()

    def interrupt_all(self) -> None:
        """Interrupt all requests at once."""
        for operation in list(self._under_way.values()):
            operation.interrupt()

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (following := self._next()) is not None:
            unique, is_due = following
            try:
                if is_due and (operation := self._under_way.get(unique)):
                    operation.interrupt()
                # Again when it is due: it may not have waited for the lock before. The server may be slow.
                threading.Thread(target=self._cancel, args=(unique,), name="cancel", daemon=True).start()
            except Exception:
                log.exception("an INTERRUPT of the kernel failed")  # others need this thread

    def _cancel(self, unique: int) -> None:
        try:
            self._cancel_lock(unique)
        except Exception:
            log.exception("a request for a file lock could not be cancelled")

    def _next(self) -> tuple[int, bool] | None:
        """Wait for the next request to be interrupted, and whether its grace is over; None at the end."""
        with self._changed:
            while not self._closed:
                if self._now:
                    return self._now.popleft(), False
                left = self._due[0][0] - time.monotonic() if self._due else None
                if left is not None and left <= 0:
                    return self._due.popleft()[1], True
                self._changed.wait(left)
        return None
