"""Pure: from the times of steps to how much slower than its curve each worker is now.

Each worker's relative error, x = measured / expected - 1, goes into a two-sided CUSUM (Page 1954): S = max(0,
S + x - DRIFT) for slowdowns, likewise with -x for power that comes back. What exceeds LIMIT is a change: a
large one after one or two steps, a small one after as many as it takes to tell it from noise. The new level
is the mean since S last was 0; after 4, 8, 16 and 32 steps, when the mean is worth more, it is refined.

With normal noise of 10 % of the time (sigma = 0.1), drift 0.1 and limit 0.8, S drifts downward by one sigma
per step. By Siegmund's approximation the mean time to a false alarm is (exp(2 b) - 2 b - 1) / 2 steps per
worker and side with b = 0.8 / 0.1 + 1.166, which is 46 million. A worker at 0.81 of its speed (x = 0.23) is
found after about 0.8 / 0.13 = 6 steps, one at 0.57 (x = 0.75) after 2; when they are back (x = -0.19 and
-0.43) after 9 and 3.
"""

from __future__ import annotations

import numpy as np

from millpond.train.balance.curve import Bools, Floats, Ints

DRIFT, LIMIT = 0.1, 0.8
LOOK_AGAIN = (4, 8, 16, 32)
"""Steps after a change when its level is refined."""
_SIDES = np.array([[1.0], [-1.0]])
WORTH_IT = 0.02
"""Relative: a refinement by less than this is left."""


class Slowness:
    """For all workers at once. ``level[i]`` is how many times as long as on its curve worker i takes."""

    def __init__(self, size: int) -> None:
        self.level: Floats = np.ones(size)
        self._cusum = np.zeros((2, size))  # S for slowdowns, and for power that comes back
        self._sums = np.zeros((3, size))  # of measured / expected: while either S is over 0, since the change
        self._counts = np.zeros((3, size))  # steps of these
        self._counts[2] = LOOK_AGAIN[-1]

    def observe(self, expected: Floats, measured: Floats) -> bool:
        """One step's seconds; NaN for who did not work. Whether any level changed."""
        seen = np.isfinite(measured) & (expected > 0)
        ratio = np.where(seen, measured / np.where(seen, expected, 1.0), 1.0)
        self._cusum = np.maximum(self._cusum + (_SIDES * (ratio - 1) - DRIFT) * seen, 0.0)
        self._sums += ratio * seen
        self._counts += seen
        lasts = self._cusum > 0
        self._sums[:2] *= lasts
        self._counts[:2] *= lasts
        changed = [self._take(side, np.flatnonzero(self._cusum[side] > LIMIT)) for side in (0, 1)]
        return self._refine(seen) or any(changed)

    def _take(self, side: int, ranks: Ints) -> bool:
        """The level of those that changed is from now on the mean since the change began."""
        self.level[ranks] *= self._sums[side, ranks] / self._counts[side, ranks]
        self._restart(ranks)
        return bool(ranks.size)

    def _restart(self, ranks: Ints) -> None:
        for array in (self._cusum, self._sums, self._counts):
            array[:, ranks] = 0.0

    def _refine(self, seen: Bools) -> bool:
        ranks = np.flatnonzero(seen & (self._counts[2] < LOOK_AGAIN[-1] + 1))
        ranks = ranks[np.isin(self._counts[2, ranks], LOOK_AGAIN)]
        mean = self._sums[2, ranks] / self._counts[2, ranks]
        ranks = ranks[np.abs(mean - 1) > WORTH_IT]
        steps = self._counts[2, ranks]
        self.level[ranks] *= self._sums[2, ranks] / steps
        self._restart(ranks)
        self._sums[2, ranks] = self._counts[2, ranks] = steps
        return bool(ranks.size)
