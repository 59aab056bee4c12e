"""Edge: eventfds as doorbell interrupts, rung only for a peer whose sleep flag is set."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress

SAFETY_TIMEOUT_MS = 100
"""The longest sleep: a wake-up lost to a missing memory fence costs this much, never a hang."""

_fence = threading.Lock()


def fence() -> None:
    """Order the stores before it with the loads after it. An uncontended lock does that on x86 and nearly so
    elsewhere; what is left is for the safety timeout.
    """
    _fence.acquire()
    _fence.release()


class Ringer:
    """Wakes the peer that waits on ``bell``."""

    def __init__(self, flag: memoryview, bell: int) -> None:
        self._flag, self._bell = flag, bell

    def ring(self) -> None:
        """Wake the peer if it sleeps; call it after what it waits for is in the ring."""
        fence()
        if self._flag[0]:
            self._flag[0] = 0  # before the bell: whoever clears a flag always rings after it
            with suppress(BlockingIOError):  # the counter is at its end, so the peer is awake already
                os.eventfd_write(self._bell, 1)


class Sleeper:
    """Waits on ``bell`` until the ring says that there is something to do."""

    def __init__(self, flag: memoryview, bell: int) -> None:
        self._flag, self._bell = flag, bell
        self._poll = select.poll()
        self._poll.register(bell, select.POLLIN)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Sleep until rung, at most 100 ms; not at all if ``ready`` once the flag is up."""
        self._flag[0] = 1
        fence()
        if not ready() and self._poll.poll(SAFETY_TIMEOUT_MS):
            drain(self._bell)
        self._flag[0] = 0


def drain(bell: int) -> None:
    """Take what has been rung so far."""
    with suppress(BlockingIOError):
        os.eventfd_read(bell)
