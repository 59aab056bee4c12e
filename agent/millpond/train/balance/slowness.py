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

from millpond.train.balance.curve import Bools, Floats

DRIFT, LIMIT = 0.1, 0.8
LOOK_AGAIN = (4, 8, 16, 32)
"""Steps after a change when its level is refined."""
WORTH_IT = 0.02
"""Relative: a refinement by less than this is left."""


class Slowness:
    """For all workers at once. ``level[i]`` is how many times as long as on its curve worker i takes."""

    def __init__(self, size: int) -> None:
        self.level: Floats = np.ones(size)
        self._up, self._down = np.zeros(size), np.zeros(size)  # the sums S
        self._sums = np.zeros((3, size))  # of measured / expected since: _up was 0, _down was 0, the change
        self._counts = np.zeros((3, size), dtype=np.int64)
        self._counts[2] = LOOK_AGAIN[-1]

    def observe(self, expected: Floats, measured: Floats) -> bool:
        """One step's seconds; NaN for who did not work. Whether any level changed."""
        seen = np.isfinite(measured) & (expected > 0)
        ratio = np.where(seen, measured / np.where(seen, expected, 1.0), 1.0)
        error = ratio - 1
        self._up = np.where(seen, np.maximum(self._up + error - DRIFT, 0.0), self._up)
        self._down = np.where(seen, np.maximum(self._down - error - DRIFT, 0.0), self._down)
        self._sums += np.where(seen, ratio, 0.0)
        self._counts += seen
        self._forget(0, self._up == 0)
        self._forget(1, self._down == 0)
        changed = self._take(0, self._up > LIMIT) | self._take(1, self._down > LIMIT)
        return bool(np.any(changed | self._refine(seen & ~changed)))

    def reset(self, rank: int) -> None:
        """Of a worker that has come back: it is taken to be as fast as its curve."""
        self.level[rank] = 1.0
        self._restart(np.arange(len(self.level)) == rank)

    def _forget(self, row: int, where: Bools) -> None:
        self._sums[row][where] = 0.0
        self._counts[row][where] = 0

    def _take(self, row: int, changed: Bools) -> Bools:
        """The level of those that changed is from now on the mean since the change began."""
        if changed.any():
            self.level[changed] *= self._sums[row][changed] / self._counts[row][changed]
            self._restart(changed)
        return changed

    def _restart(self, where: Bools) -> None:
        self._up[where] = self._down[where] = 0.0
        for row in range(3):
            self._forget(row, where)

    def _refine(self, seen: Bools) -> Bools:
        due = seen & np.isin(self._counts[2], LOOK_AGAIN)
        mean = np.where(due, self._sums[2] / np.maximum(self._counts[2], 1), 1.0)
        refined: Bools = due & (np.abs(mean - 1) > WORTH_IT)
        if refined.any():
            self.level[refined] *= mean[refined]
            count = self._counts[2][refined]
            self._restart(refined)
            self._counts[2][refined] = count
            self._sums[2][refined] = count
        return refined
