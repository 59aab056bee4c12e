# SPDX-License-Identifier: Apache-2.0
"""Pure: the batches of a job's workers, re-tuned after each step by its measured times.

A worker that sits out is too slow for the smallest batch, and so is not measured. The load of its processor
shows when that ends; where the load is unknown, or does not account for the slowness, the worker is probed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from millpond.train.balance.curve import Bools, Floats, Ints
from millpond.train.balance.equal_time import LEAST_BATCH, Cohort
from millpond.train.balance.slowness import Slowness

PATIENCE = 1.1
"""The longest step over the planned one. In simulations of 1,000 devices with 10 % of them busy, 1.25 gives
0.79 of the ideal, 1.1 gives 0.89 and 1.02 gives 0.93; but the smaller it is, the more sums come a step late.
"""
GRACE = 0.1
"""Seconds that a step waits at least beyond the planned time: what scheduling and waking up alone may cost
where processors are shared. Not waiting for it would make a worker a whole step late for nothing.
"""
PROBE = 50
"""Steps after which a worker that sits out gets the smallest batch once; no step waits for it."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Batches by rank (0: sits out or is absent), the seconds that each is expected to take, and the seconds
    after which a step ends without late workers (inf: it waits for all).
    """

    batches: Ints
    times: Floats
    deadline: float


def deadline_of(times: Floats, patience: float | None) -> float:
    """Return ``patience`` times the longest planned time, at least GRACE seconds more; None waits for all."""
    longest = float(times.max())
    return float("inf") if patience is None else max(patience * longest, longest + GRACE)


class BalanceController:
    """Plans equal-time batches for ``cohort`` and re-plans when a worker's speed has changed.

    With ``total`` the sum of the batches is fixed, or as near to it as the ``present`` workers can come.
    ``levels`` by rank are how many times as long as on their curves the workers take at first. ``probes``
    says whether workers that sit out are probed. Raises ValueError if not even the whole cohort could have
    ``total``.
    """

    def __init__(
        self,
        cohort: Cohort,
        *,
        total: int | None = None,
        patience: float | None = PATIENCE,
        levels: Floats | None = None,
        present: Bools | None = None,
        probes: bool = True,
    ) -> None:
        self._probes = probes
        self.cohort, self._total, self._patience = cohort, total, patience
        ones = np.ones(cohort.size)
        if total is not None:
            cohort.batches_of(total, ones)
        self._slowness = Slowness(ones if levels is None else levels)
        self.present: Bools = np.ones(cohort.size, dtype=np.bool_) if present is None else present.copy()
        self._all_present = bool(self.present.all())
        self._sat_out: Ints = np.zeros(cohort.size, dtype=np.int64)  # steps
        self.plan = self._make_plan()

    @property
    def slowness(self) -> Floats:
        """Return how many times as long as on its curve each worker takes, as far as it is known."""
        return self._slowness.level.copy()

    def observe(
        self, batches: Ints, measured: Floats, busy: Floats | None = None, _left: float = 1.0, /
    ) -> bool:
        """Take in the measurements of a step; return whether there is a new plan.

        Arrays are by rank: the batch that the worker did last; the seconds of its whole own work for it, NaN
        if it did none in this step; the part of its processor that other work takes, 0 to 1, NaN if unknown.
        """
        if not self._all_present:
            measured = np.where(self.present, measured, np.nan)
            busy = None if busy is None else np.where(self.present, busy, np.nan)
        expected = self.cohort.times(batches, self._slowness.level)
        changed = self._slowness.observe(expected, measured, busy)
        before = self.plan
        self.plan = self._with_probes(self._change_plan(changed) if changed.size else self._steady)
        return self.plan is not before and bool(np.any(before.batches != self.plan.batches))

    def join(self, rank: int, level: float = 1.0) -> BatchPlan:
        """Add a worker, new or returned; forget its earlier measurements. Return the plan with it."""
        return self._set_present(rank, True, level)

    def leave(self, rank: int) -> BatchPlan:
        """Remove a worker. Return the plan without it."""
        return self._set_present(rank, False, 1.0)

    def _set_present(self, rank: int, present: bool, level: float) -> BatchPlan:
        self.present[rank] = present
        self._all_present = bool(self.present.all())
        self._slowness.reset(rank, level)
        self.plan = self._make_plan()
        return self.plan

    def _make_plan(self) -> BatchPlan:
        if self._total is None:
            level = self._level()
            self._seconds = self.cohort.step_seconds(level)
            return self._set_steady(self.cohort.batches(self._seconds, level))
        total = self.cohort.nearest(self._total, self.present)
        none = np.zeros(self.cohort.size, dtype=np.int64)
        return self._set_steady(self.cohort.batches_of(total, self._level()) if total else none)

    def _change_plan(self, ranks: Ints) -> BatchPlan:
        """Re-plan for new levels of some ranks; other batches stay if the step is as long as before."""
        level = self._level()
        if self._total is not None or self.cohort.step_seconds(level) != self._seconds:
            return self._make_plan()
        batches = self._steady.batches.copy()
        batches[ranks] = self.cohort.batches_for(ranks, self._seconds, level)
        return self._set_steady(batches)

    def _level(self) -> Floats:
        level = self._slowness.level
        return level if self._all_present else np.where(self.present, level, np.inf)

    def _set_steady(self, batches: Ints) -> BatchPlan:
        times = self.cohort.times(batches, self._slowness.level)
        self._steady = BatchPlan(batches, times, deadline_of(times, self._patience))
        self._idle = np.flatnonzero((batches == 0) & self.present & (self.cohort.caps > 0))
        sat_out = self._sat_out[self._idle]
        self._sat_out.fill(0)
        self._sat_out[self._idle] = sat_out
        return self._steady

    def _with_probes(self, steady: BatchPlan) -> BatchPlan:
        """Give the smallest batch to idle workers that are due to show whether they are still as slow."""
        if not self._probes or not self._idle.size:
            return steady
        self._sat_out[self._idle] += 1
        due = self._slowness.unexplained(self._idle[self._sat_out[self._idle] >= PROBE])
        if not due.size:
            return steady
        batches = steady.batches.copy()
        if self._total is not None:
            due = due[: _make_room(batches)]
        batches[due], self._sat_out[due] = LEAST_BATCH, 0
        self._slowness.probe(due)
        return replace(steady, batches=batches, times=self.cohort.times(batches, self._slowness.level))


def _make_room(batches: Ints) -> int:
    """Take a probe's two samples from one of the largest batches, so that the sum stays; return 1 if
    possible.
    """
    can = np.where((batches == LEAST_BATCH) | (batches >= 2 * LEAST_BATCH), batches, 0)
    rank = int(np.argmax(can))
    if not can[rank]:
        return 0
    batches[rank] -= LEAST_BATCH
    return 1
