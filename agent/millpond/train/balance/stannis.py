# SPDX-License-Identifier: Apache-2.0
"""Pure: the rule of the Stannis paper (section IV-B), for comparison.

After each step a worker's decline index is 0.7 (SP - SP_i) / SP + 0.3 (N - i) / N (eq. 2), with SP its normal
speed, SP_i that of step i of the N of an epoch. An index over 20 % in 5 steps one after the other ends the
epoch, and the worker gets the batch at which its curve has the present speed (eq. 3). As printed, eq. 2 is
over 20 % in the first third of any epoch, and eq. 3 has its two weights swapped; here the second term is left
out and the weights are the right way round, which is kinder to it. Two more things are kinder than what is
printed, and nearer to the paper's results, in which a batch of 180 became 140 or 100, and stayed. The normal
speed is that of the curve at first, and after a new batch as much slower as was measured then: or else the
same decline would be found every 5 steps, until 2 samples are left. And no batch is less than the smallest on
the curve: eq. 3 lies between two of its points. Batches only ever become smaller.
"""

from __future__ import annotations

import numpy as np

from millpond.train.balance.controller import BalanceController, BatchPlan, deadline_of
from millpond.train.balance.curve import Bools, Floats, Ints
from millpond.train.balance.equal_time import LEAST_BATCH, Cohort

_WEIGHT, _THRESHOLD, _IN_A_ROW = 0.7, 0.2, 5


class Stannis:
    """A ``policy.Elastic`` that begins with the controller's batches. It has no deadline, a step waits for
    all, and it uses no processor's load. ``slowness`` is that of the beginning.
    """

    def __init__(
        self,
        cohort: Cohort,
        *,
        total: int | None = None,
        levels: Floats | None = None,
        present: Bools | None = None,
    ) -> None:
        self._cohort = cohort
        self.slowness: Floats = np.ones(cohort.size) if levels is None else levels.copy()
        self._start = BalanceController(cohort, total=total, levels=levels).plan.batches
        self._own = self._start.copy()  # of all workers, present or not
        self._normal: Floats = self.slowness.copy()  # since the last new batch
        self._present = np.ones(cohort.size, dtype=np.bool_) if present is None else present.copy()
        self._flags = np.zeros(cohort.size, dtype=np.int64)
        self.plan = self._make_plan()

    def _make_plan(self) -> BatchPlan:
        batches = np.where(self._present, self._own, 0)
        times = self._cohort.times(batches, self._normal)
        return BatchPlan(batches, times, deadline_of(times, None))

    def observe(self, batches: Ints, measured: Floats, _busy: Floats | None = None, /) -> bool:
        """Take in one step's seconds by rank. Return whether there is a new plan."""
        worked = np.isfinite(measured) & (batches > 0) & self._present
        normal = self._cohort.times(batches, self._normal)
        speed = np.where(worked, normal / np.where(worked, measured, 1.0), 1.0)  # part of the normal one
        flagged = _WEIGHT * (1 - speed) > _THRESHOLD
        self._flags = np.where(worked, np.where(flagged, self._flags + 1, 0), self._flags)
        changed = np.flatnonzero(self._flags >= _IN_A_ROW)
        if not changed.size:
            return False
        self._flags[changed] = 0
        smaller = np.array([self._at_speed(int(rank), float(speed[rank])) for rank in changed])
        self._own[changed] = np.minimum(self._own[changed], smaller)
        self._normal[changed] /= speed[changed]
        self.plan = self._make_plan()
        return True

    def join(self, rank: int, level: float = 1.0) -> BatchPlan:
        """Add a worker, new or returned, with its first batch. Return the plan with it."""
        self.slowness[rank] = self._normal[rank] = level
        self._own[rank] = self._start[rank]
        return self._set_present(rank, True)

    def leave(self, rank: int) -> BatchPlan:
        """Remove a worker. Return the plan without it."""
        return self._set_present(rank, False)

    def _set_present(self, rank: int, present: bool) -> BatchPlan:
        self._present[rank], self._flags[rank] = present, 0
        self.plan = self._make_plan()
        return self.plan

    def _at_speed(self, rank: int, part: float) -> int:
        """Return the batch at which a worker's curve has ``part`` of its present speed (eq. 3)."""
        curve = self._cohort.kinds[self._cohort.members[rank]].curve
        own = int(self._own[rank])
        batches = np.arange(min(max(LEAST_BATCH, curve.batches[0]), own), own + 1)
        speeds = batches / curve.time(batches)
        slow_enough = batches[speeds <= part * speeds[-1]]
        return int(slow_enough[-1] if slow_enough.size else batches[0])
