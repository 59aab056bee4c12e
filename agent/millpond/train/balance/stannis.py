"""Pure: the rule of the Stannis paper (section IV-B), for comparison.

After each step a worker's decline index is 0.7 (SP - SP_i) / SP + 0.3 (N - i) / N (eq. 2), with SP its speed
on its curve, SP_i that of step i of the N of an epoch. An index over 20 % in 5 steps one after the other ends
the epoch, and the worker gets the batch at which its curve has the present speed (eq. 3). As printed, eq. 2
is over 20 % in the first third of any epoch, and eq. 3 has its two weights swapped; here the second term is
left out and the weights are the right way round, which is kinder to it. Batches only ever become smaller.
"""

from __future__ import annotations

import numpy as np

from millpond.train.balance.controller import Plan
from millpond.train.balance.curve import Floats, Ints
from millpond.train.balance.equal_time import LEAST_BATCH, Crew

_WEIGHT, _THRESHOLD, _IN_A_ROW = 0.7, 0.2, 5


class Stannis:
    """A ``simulation.Policy``. It knows no deadline: a step waits for everyone."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._normal = np.ones(crew.size)
        self._flags = np.zeros(crew.size, dtype=np.int64)
        batches = crew.batches(crew.step_seconds(self._normal), self._normal)
        self.plan = self._plan(batches)

    def _plan(self, batches: Ints) -> Plan:
        return Plan(batches, self._crew.times(batches, self._normal), float("inf"))

    def observe(self, batches: Ints, measured: Floats) -> bool:
        """One step's seconds by rank. Whether there is a new plan."""
        worked = np.isfinite(measured) & (batches > 0)
        normal = self._crew.times(batches, self._normal)
        speed = np.where(worked, normal / np.where(worked, measured, 1.0), 1.0)  # part of the curve's
        flagged = _WEIGHT * (1 - speed) > _THRESHOLD
        self._flags = np.where(flagged, self._flags + 1, 0)
        changed = self._flags >= _IN_A_ROW
        if not changed.any():
            return False
        self._flags[changed] = 0
        smaller = np.array(
            [self._at_speed(int(rank), float(speed[rank])) for rank in np.flatnonzero(changed)]
        )
        found = self.plan.batches.copy()
        found[changed] = np.minimum(found[changed], smaller)
        self.plan = self._plan(found)
        return True

    def _at_speed(self, rank: int, part: float) -> int:
        """The batch at which its curve has ``part`` of the speed that it has now (eq. 3)."""
        curve = self._crew.kinds[self._crew.members[rank]].curve
        batches = np.arange(LEAST_BATCH, int(self.plan.batches[rank]) + 1)
        speeds = batches / curve.time(batches)
        slow_enough = batches[speeds <= part * speeds[-1]]
        return int(slow_enough[-1]) if len(slow_enough) else LEAST_BATCH
