# SPDX-License-Identifier: Apache-2.0
"""Pure: how much slower than its curve each worker is now, from the times of steps.

Each worker's relative error, x = (measured - expected) / (expected + JITTER), goes into a two-sided CUSUM
(Page 1954): S = max(0, S + x - DRIFT) for slowdowns, likewise with -x for power that comes back. An S over
LIMIT is a change: a large one after one or two steps, a small one after as many as it takes to tell it from
noise. The new level is the mean since S last was 0, where x is S / n + DRIFT on average over these n steps;
after 4, 8, 16 and 32 steps, when the mean is worth more, it is refined.

With normal noise of 10 % of the time (sigma = 0.1), drift 0.1 and limit 0.8, S drifts downward by one sigma
per step. By Siegmund's approximation the mean time to a false alarm is (exp(2 b) - 2 b - 1) / 2 steps per
worker and side with b = 0.8 / 0.1 + 1.166, which is 46 million. A worker at 0.81 of its speed (x = 0.23) is
found after about 0.8 / 0.13 = 6 steps, one at 0.57 (x = 0.75) after 2; when they are back (x = -0.19 and
-0.43) after 9 and 3.

The load of the processor is a second witness. Where it has changed (by 5 deviations, see ``cpu_share``) and
the time of the step has too, in the same direction and by AGREE (3 deviations up, 2.3 down), the time is
believed at once; noise does both in less than one of 10^8 steps of a worker. Where they disagree, the filter
decides. A worker that is not measured, being late or sitting out, is as slow as its load makes it.
"""

from __future__ import annotations

import numpy as np

from millpond.train.balance.cpu_share import CpuShare
from millpond.train.balance.curve import Bools, Floats, Ints

DRIFT, LIMIT = 0.1, 0.8
LOOK_AGAIN, LOOK_LAST = 4, 32
"""Steps after a change when its level is refined: the first, twice as many, and so on to the last."""
JITTER = 0.05
"""Seconds that scheduling alone may add to a step: an error is relative to the expected time and these."""
WORTH_IT = 0.02
"""Relative: a refinement by less than this is left."""
AGREE = 1.3
"""A time so many times as long as expected, or as short, is believed at once where other evidence agrees."""


class Slowness:
    """Estimates the slowness of workers: worker i takes ``level[i]`` times as long as on its curve."""

    def __init__(self, levels: Floats) -> None:
        size = len(levels)
        self.level: Floats = levels.copy()
        self._share = CpuShare(size)
        self._error = np.zeros(size)  # x of this step, 0 for workers that were not measured
        self._cusum = np.zeros(size), np.zeros(size)  # S for slowdowns, and for power that comes back
        self._lasts = np.zeros(size), np.zeros(size)  # steps since they were 0
        self._steps, self._errors = np.zeros(size), np.zeros(size)  # since the last change, and their sum
        self._look = np.full(size, np.inf)  # after how many steps to refine
        self._probed = np.zeros(size, dtype=np.bool_)

    def observe(self, expected: Floats, measured: Floats, busy: Floats | None = None) -> Ints:
        """Take in one step's seconds, NaN for workers that were not measured; ``busy`` as in ``cpu_share``.
        Return the ranks whose levels changed, some perhaps twice.
        """
        seen = self._measure(expected, measured)
        changed = [self._take_probes(seen)]
        if busy is not None:
            self._share.observe(busy)
            ranks = self._share.changed()
            changed += [self._take_agreed(ranks[seen[ranks]]), self._estimate(ranks[~seen[ranks]])]
            changed += [self._estimate_mean(np.flatnonzero(~seen))]
        changed += [self._take(0), self._take(1), self._refine()]
        if busy is not None:
            self._share.track(seen)
        return np.concatenate(changed)

    def probe(self, ranks: Ints) -> None:
        """Believe the next time of ``ranks`` at once: they have not been measured for long."""
        self._probed[ranks] = True

    def reset(self, rank: int, level: float) -> None:
        """Forget all measurements of a worker; only its level is known."""
        alone = np.array([rank])
        self.level[rank] = level
        self._share.forget(rank)
        self._restart(alone)
        self._look[rank], self._probed[rank] = np.inf, False

    def unexplained(self, ranks: Ints) -> Ints:
        """Return those of ``ranks`` that are slower than their processors' load, if known, accounts for."""
        return ranks[~(self.level[ranks] <= AGREE * self._share.slowness(ranks))]

    def _measure(self, expected: Floats, measured: Floats) -> Bools:
        """Add this step's errors to the sums. Return the mask of the workers that were measured."""
        seen = (measured > 0) & (measured < np.inf) & (expected > 0)
        with np.errstate(all="ignore"):  # a mask would take four times as long as what it saves
            np.subtract(measured, expected, out=self._error)
            self._error /= expected + JITTER
        np.copyto(self._error, 0.0, where=~seen)
        weight = seen.astype(np.float64)
        drift = weight * DRIFT
        for add, cusum, lasts in zip((np.add, np.subtract), self._cusum, self._lasts, strict=True):
            add(cusum, self._error, out=cusum)
            cusum -= drift
            lasts += weight
            positive = (cusum > 0).astype(np.float64)
            cusum *= positive
            lasts *= positive
        self._steps += weight
        self._errors += self._error
        return seen

    def _take(self, side: int) -> Ints:
        """Set the level of workers that changed to the mean since the change began. Return their ranks."""
        ranks = np.flatnonzero(self._cusum[side] > LIMIT)
        mean = self._cusum[side][ranks] / self._lasts[side][ranks] + DRIFT
        return self._change(ranks, 1 + mean if side == 0 else 1 - mean)

    def _take_probes(self, seen: Bools) -> Ints:
        ranks = np.flatnonzero(self._probed)
        ranks = ranks[seen[ranks]]
        self._probed[ranks] = False
        ratio = 1 + self._error[ranks]
        far = (ratio > AGREE) | (ratio * AGREE < 1)
        return self._change(ranks[far], ratio[far])

    def _take_agreed(self, ranks: Ints) -> Ints:
        ratio, factor = 1 + self._error[ranks], self._share.factor(ranks)
        agreed = ((ratio > AGREE) & (factor > 1)) | ((ratio * AGREE < 1) & (factor < 1))
        return self._change(ranks[agreed], ratio[agreed])

    def _estimate(self, ranks: Ints) -> Ints:
        """Change the levels of ranks that were not measured as this step's load has changed."""
        return self._change(ranks, self._share.factor(ranks))

    def _estimate_mean(self, ranks: Ints) -> Ints:
        """Change the levels of ranks whose average load has changed by less, which shows after some steps."""
        ranks = self._share.changed_mean(ranks)
        self.level[ranks] *= self._share.factor_mean(ranks)
        self._share.rebase_mean(ranks)
        return ranks

    def _change(self, ranks: Ints, factor: Floats) -> Ints:
        if ranks.size:
            self.level[ranks] *= factor
            self._restart(ranks)
            self._share.rebase(ranks)
        return ranks

    def _restart(self, ranks: Ints) -> None:
        for array in (*self._cusum, *self._lasts, self._steps, self._errors):
            array[ranks] = 0.0
        self._look[ranks] = LOOK_AGAIN

    def _refine(self) -> Ints:
        ranks = np.flatnonzero(self._steps == self._look)
        steps = self._steps[ranks]
        mean = self._errors[ranks] / steps
        self._look[ranks] = np.where(steps < LOOK_LAST, 2 * steps, np.inf)
        worth = np.abs(mean) > WORTH_IT
        ranks = ranks[worth]
        self.level[ranks] *= 1 + mean[worth]
        for array in (*self._cusum, *self._lasts, self._errors):
            array[ranks] = 0.0
        return ranks
