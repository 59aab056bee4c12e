# SPDX-License-Identifier: Apache-2.0
"""Pure: the operation that a thread performs for a program, as far as code below the kernel binding sees it.

An operation that is about to wait says so, and the binding lets another thread serve meanwhile. It also says
how it can be woken, so that the program's signal ends the wait (FUSE_INTERRUPT).
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Final

from millpond.fs.vfs.path_api import os_error

NOTHING: Final = -1
"""In place of a descriptor: the operation waits for something else."""
_TICK = 0.2

_waking = threading.Lock()  # of all operations: it is held for an instant, to wait and to interrupt


class Operation:
    """One operation that began at ``began`` (seconds of the monotonic clock; 0: with each of its requests).

    ``on_wait`` is called before it waits, with the descriptor that ends the wait by becoming readable, or
    NOTHING, and for how many seconds at most; it may return early. ``is_interrupted``: the program has
    received a signal.
    """

    __slots__ = ("_on_wait", "_wakes", "began", "is_interrupted")

    def __init__(
        self, began: float = 0.0, on_wait: Callable[[int, float], None] = lambda _descriptor, _seconds: None
    ) -> None:
        self.began, self._on_wait = began, on_wait
        self.is_interrupted = False
        self._wakes: list[Callable[[], None]] = []

    def about_to_wait(self, descriptor: int = NOTHING, seconds: float = 0.0) -> None:
        """Tell the kernel binding that this thread is about to wait."""
        self._on_wait(descriptor, seconds)

    def interrupt(self) -> None:
        """Interrupt the operation: wake it if it waits, and fail its later waits."""
        with _waking:
            self.is_interrupted, wakes = True, self._wakes[:]
        for wake in wakes:
            wake()

    def add_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from another thread, when the operation is interrupted. Raises OSError
        (EINTR) if it was before.
        """
        with _waking:
            if self.is_interrupted:
                raise os_error(errno.EINTR)
            self._wakes.append(wake)

    def remove_wake(self, wake: Callable[[], None]) -> None:
        """Do not have ``wake`` called any more: the wait is over."""
        with _waking:
            self._wakes.remove(wake)


current: ContextVar[Operation | None] = ContextVar("current", default=None)
"""The operation that this thread performs; None outside a kernel binding."""


def about_to_wait(descriptor: int = NOTHING, seconds: float = 0.0) -> None:
    """Tell the kernel binding, if there is one, that this thread is about to wait; see ``Operation``."""
    if operation := current.get():
        operation.about_to_wait(descriptor, seconds)


@contextlib.contextmanager
def woken_by(wake: Callable[[], None]) -> Iterator[Operation]:
    """Have ``wake`` called if the operation of this thread is interrupted before the end of the block. Yields
    the operation; outside a kernel binding one that is never interrupted. Raises OSError (EINTR).
    """
    operation = current.get() or Operation()
    operation.add_wake(wake)
    try:
        yield operation
    finally:
        operation.remove_wake(wake)


def pause(seconds: float) -> None:
    """Wait so long, or until the operation is interrupted."""
    woken = threading.Event()
    with woken_by(woken.set):
        woken.wait(seconds)


@contextlib.contextmanager
def held(
    lock: threading.Lock, seconds: float = threading.TIMEOUT_MAX, *, interruptible: bool = False
) -> Iterator[None]:
    """Hold a lock that another thread may hold while it waits for another process. Raises OSError: ETIMEDOUT
    if it is not free within ``seconds``; EINTR if the operation is ``interruptible`` and was interrupted.
    """
    if not lock.acquire(blocking=False):
        about_to_wait()
        end, operation = time.monotonic() + seconds, current.get() if interruptible else None
        tick = _TICK if operation else seconds
        while not lock.acquire(timeout=max(0.0, min(tick, end - time.monotonic()))):
            if operation and operation.is_interrupted:
                raise os_error(errno.EINTR)
            if time.monotonic() >= end:
                raise os_error(errno.ETIMEDOUT)
    try:
        yield
    finally:
        lock.release()
