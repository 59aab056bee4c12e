# SPDX-License-Identifier: Apache-2.0
"""Edge (threads, the clock): how far a launch is before all of its scripts run."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from millpond.base.text import named
from millpond.host.api.launch import LaunchPrepares

PERIOD_SECONDS = 1.0
"""The time before the first word of a launch that is slow to start, and between two."""


class Period:
    """True at most once in PERIOD_SECONDS."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __bool__(self) -> bool:
        if time.monotonic() - self._last < PERIOD_SECONDS:
            return False
        self._last = time.monotonic()
        return True


class LaunchPreparation:
    """The workers that have not begun, and the bytes of files that each is yet to be sent; thread-safe."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._lock, self._left, self._total = threading.Lock(), dict(sizes), sum(sizes.values())
        self._period = Period()
        self._is_told = False

    def sent(self, worker: str, size: int) -> None:
        """Note that a worker was sent so many bytes of its files."""
        with self._lock:
            if worker in self._left:
                self._left[worker] -= size

    def begun(self, worker: str) -> None:
        """Note that the script of a worker runs, or has ended."""
        with self._lock:
            self._left.pop(worker, None)

    @property
    def waiting(self) -> int:
        """The number of workers that have not begun."""
        with self._lock:
            return len(self._left)

    def news(self) -> LaunchPrepares | None:
        """Return the next word to the user, None where there is none now."""
        with self._lock:
            if not self._left:
                told, self._is_told = self._is_told, True
                return None if told else LaunchPrepares()
            if not self._period:
                return None
            if left := sum(self._left.values()):
                files = [name for name, size in self._left.items() if size]
                return LaunchPrepares(f"files to {named(files)}", self._total - left, self._total)
            return LaunchPrepares(f"waits for {named(list(self._left))} to start")
