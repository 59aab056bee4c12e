"""Pure: the batches of a job's workers, re-tuned after each step by what the step took.

A worker that sits out is too slow for the smallest batch, and so is not measured. The load of its processor
tells when that ends; where it is not known, or does not account for it, the worker is probed.
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
where processors are shared. Who is late by less would only be a step late for nothing.
"""
PROBE = 50
"""Steps after which a worker that sits out gets the smallest batch once; nobody waits for it."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Batches by rank (0: sits out or is absent), the seconds that each is expected to take, and how long a
    step waits, inf for ever.
    """

    batches: Ints
    times: Floats
    deadline: float


def deadline_of(times: Floats, patience: float | None) -> float:
    """``patience`` times as long as planned, but at least GRACE seconds more; None waits for everyone."""
    longest = float(times.max())
    return float("inf") if patience is None else max(patience * longest, longest + GRACE)


class BalanceController:
    """Equal-time batches for ``crew``; with ``total`` their sum is fixed, or as near to it as those who are
    ``present`` can come. ``levels`` by rank are how many times as long as on their curves they take at first.
    ``probes`` says whether who sits out is probed.
    Raises ValueError if not even the whole crew could have ``total``.
    """

    def __init__(
        self,
        crew: Cohort,
        *,
        total: int | None = None,
        patience: float | None = PATIENCE,
        levels: Floats | None = None,
        present: Bools | None = None,
        probes: bool = True,
    ) -> None:
        self._probes = probes
        self.crew, self._total, self._patience = crew, total, patience
        everyone = np.ones(crew.size)
        if total is not None:
            crew.batches_of(total, everyone)
        self._slowness = Slowness(everyone if levels is None else levels)
        self.present: Bools = np.ones(crew.size, dtype=np.bool_) if present is None else present.copy()
        self._all_present = bool(self.present.all())
        self._sat_out: Ints = np.zeros(crew.size, dtype=np.int64)  # steps
        self.plan = self._make_plan()

    @property
    def slowness(self) -> Floats:
        """How many times as long as on its curve each worker takes, as far as it is known."""
        return self._slowness.level.copy()

    def observe(self, batches: Ints, measured: Floats, busy: Floats | None = None, /) -> bool:
        """The batch that each worker did last and the seconds of its whole own work for it, NaN for who did
        none in this step; the part of its processor that other work takes, 0 to 1, NaN if unknown. Whether
        there is a new plan.
        """
        if not self._all_present:
            measured = np.where(self.present, measured, np.nan)
            busy = None if busy is None else np.where(self.present, busy, np.nan)
        expected = self.crew.times(batches, self._slowness.level)
        changed = self._slowness.observe(expected, measured, busy)
        before = self.plan
        self.plan = self._with_probes(self._change_plan(changed) if changed.size else self._steady)
        return self.plan is not before and bool(np.any(before.batches != self.plan.batches))

    def join(self, rank: int, level: float = 1.0) -> BatchPlan:
        """A worker is there, for the first time or again; what was known of it before is forgotten."""
        return self._attend(rank, True, level)

    def leave(self, rank: int) -> BatchPlan:
        """A worker is not there any more."""
        return self._attend(rank, False, 1.0)

    def _attend(self, rank: int, present: bool, level: float) -> BatchPlan:
        self.present[rank] = present
        self._all_present = bool(self.present.all())
        self._slowness.reset(rank, level)
        self.plan = self._make_plan()
        return self.plan

    def _make_plan(self) -> BatchPlan:
        if self._total is None:
            level = self._level()
            self._seconds = self.crew.step_seconds(level)
            return self._settle(self.crew.batches(self._seconds, level))
        total = self.crew.nearest(self._total, self.present)
        nobody = np.zeros(self.crew.size, dtype=np.int64)
        return self._settle(self.crew.batches_of(total, self._level()) if total else nobody)

    def _change_plan(self, ranks: Ints) -> BatchPlan:
        """With other levels of some; the others' batches stay if the step is as long as before."""
        level = self._level()
        if self._total is not None or self.crew.step_seconds(level) != self._seconds:
            return self._make_plan()
        batches = self._steady.batches.copy()
        batches[ranks] = self.crew.batches_for(ranks, self._seconds, level)
        return self._settle(batches)

    def _level(self) -> Floats:
        level = self._slowness.level
        return level if self._all_present else np.where(self.present, level, np.inf)

    def _settle(self, batches: Ints) -> BatchPlan:
        times = self.crew.times(batches, self._slowness.level)
        self._steady = BatchPlan(batches, times, deadline_of(times, self._patience))
        self._idle = np.flatnonzero((batches == 0) & self.present & (self.crew.caps > 0))
        sat_out = self._sat_out[self._idle]
        self._sat_out.fill(0)
        self._sat_out[self._idle] = sat_out
        return self._steady

    def _with_probes(self, steady: BatchPlan) -> BatchPlan:
        """With the smallest batch for those whose turn it is to show whether they are still as slow."""
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
        return replace(steady, batches=batches, times=self.crew.times(batches, self._slowness.level))


def _make_room(batches: Ints) -> int:
    """Take a probe's two samples from one of the largest batches, so that the sum stays; 1 if that can be."""
    can = np.where((batches == LEAST_BATCH) | (batches >= 2 * LEAST_BATCH), batches, 0)
    rank = int(np.argmax(can))
    if not can[rank]:
        return 0
    batches[rank] -= LEAST_BATCH
    return 1
