# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): how far a worker is with an exchange, told now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

PERIOD_SECONDS = 2.0


class ExchangePace:
    """Calls ``tell`` with the percentage of an exchange's samples that are computed, if it has grown, every
    PERIOD_SECONDS at most. While ``counts`` is false it counts none, as of repetitions of unknown
    number. ``clock`` is a steady one (s).
    """

    def __init__(self, tell: Callable[[int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self.begin(0)

    def begin(self, samples: int) -> None:
        """Begin an exchange of so many samples, counted each time that they are computed; 0 for a number that
        nobody knows.
        """
        self.counts = True
        self._total, self._done, self._told, self._next = samples, 0, 0, self._clock() + PERIOD_SECONDS

    def add(self, samples: int) -> None:
        """Count samples that are computed. The answer tells the end."""
        self._done += samples if self.counts else 0
        if self._done < self._total and (now := self._clock()) >= self._next:
            self._next = now + PERIOD_SECONDS
            if (percent := 100 * self._done // self._total) > self._told:
                self._told = percent
                self._tell(percent)
