# SPDX-License-Identifier: Apache-2.0
"""Pure: the policies of the Stannis paper, for comparison: its rule with each of its three methods.

The rules are the paper's (``hypertune``). A worker's normal speed is always that of its batch on its curve,
as the paper has it. So a slowdown that lasts is a decline at each new batch, too: the first two methods,
which choose by the speed, make the batch smaller every five steps, until the index is below its threshold or
the batch is the smallest measured one. The third chooses by the usage of the processor and comes to rest.

One thing differs: the paper ends the epoch when a batch changes, and loses the samples that are left of it;
here the epoch goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from millpond.train.balance.controller import BalanceController, BatchPlan, deadline_of
from millpond.train.balance.curve import Bools, Curve, Floats, Ints
from millpond.train.balance.equal_time import LEAST_BATCH, Cohort
from millpond.train.balance.hypertune import (
    IN_A_ROW,
    THRESHOLD,
    CpuUsage,
    between_pairs,
    decline_index,
    flags,
)

_ROUNDING = 1e-6  # a batch of 179.9999999 is one of 180
BySpeed = Callable[[Curve, float], float]
"""Returns the batch of a speed in samples per second, on a curve."""


class Stannis:
    """A ``policy.Elastic`` that begins with the controller's batches and never enlarges one. It has no
    deadline: a step waits for all. ``slowness`` is that of the beginning. ``method`` chooses a new batch: by
    default equation 3.
    """

    def __init__(
        self,
        cohort: Cohort,
        *,
        method: BySpeed = between_pairs,
        total: int | None = None,
        levels: Floats | None = None,
        present: Bools | None = None,
    ) -> None:
        self._cohort, self._method = cohort, method
        self.slowness: Floats = np.ones(cohort.size) if levels is None else levels.copy()
        self._start = BalanceController(cohort, total=total, levels=levels).plan.batches
        self._own = self._start.copy()  # of all workers, present or not
        self._present = np.ones(cohort.size, dtype=np.bool_) if present is None else present.copy()
        self._flags = np.zeros(cohort.size, dtype=np.int64)
        self.plan = self._make_plan()

    def _make_plan(self) -> BatchPlan:
        batches = np.where(self._present, self._own, 0)
        times = self._cohort.times(batches, self.slowness)
        return BatchPlan(batches, times, deadline_of(times, None))

    def observe(
        self, batches: Ints, measured: Floats, _busy: Floats | None = None, left: float = 1.0, /
    ) -> bool:
        """Take in one step, as ``BatchPolicy.observe``. Return whether there is a new plan."""
        worked = np.isfinite(measured) & (batches > 0) & self._present
        normal = self._cohort.times(batches, self.slowness)
        part = np.where(worked, normal / np.where(worked, measured, 1.0), 1.0)  # of the normal speed
        flagged = decline_index(np.ones_like(part), part, left) > THRESHOLD
        self._flags = flags(self._flags, flagged, worked)
        changed = np.flatnonzero(self._flags >= IN_A_ROW)
        self._flags[changed] = 0
        speeds = batches / np.where(worked, measured, 1.0) * self.slowness  # on the kinds' curves
        return self._resize({int(rank): self._smaller(int(rank), float(speeds[rank])) for rank in changed})

    def _smaller(self, rank: int, speed: float) -> float:
        """Return the batch of a worker whose kind's curve has the ``speed``, at most its present one."""
        curve = self._cohort.kinds[self._cohort.members[rank]].curve
        return min(self._method(curve, speed), float(self._own[rank]))

    def _resize(self, wanted: dict[int, float]) -> bool:
        before = self._own.copy()
        for rank, batch in wanted.items():
            self._own[rank] = max(LEAST_BATCH, int(batch + _ROUNDING))
        if np.array_equal(before, self._own):
            return False
        self.plan = self._make_plan()
        return True

    def join(self, rank: int, level: float = 1.0) -> BatchPlan:
        """Add a worker, new or returned, with its first batch. Return the plan with it."""
        self.slowness[rank] = level
        self._own[rank] = self._start[rank]
        return self._set_present(rank, True)

    def leave(self, rank: int) -> BatchPlan:
        """Remove a worker. Return the plan without it."""
        return self._set_present(rank, False)

    def _set_present(self, rank: int, present: bool) -> BatchPlan:
        self._present[rank], self._flags[rank] = present, 0
        self.plan = self._make_plan()
        return self.plan


class StannisCpu(Stannis):
    """The paper's rule with its third method: batches in proportion to the usage of the processor, which
    become larger again, too. A worker whose usage is unknown keeps its batch.
    """

    def __init__(
        self,
        cohort: Cohort,
        *,
        total: int | None = None,
        levels: Floats | None = None,
        present: Bools | None = None,
    ) -> None:
        self._usage = CpuUsage(cohort.size)
        super().__init__(cohort, total=total, levels=levels, present=present)

    def observe(
        self, batches: Ints, measured: Floats, busy: Floats | None = None, left: float = 1.0, /
    ) -> bool:
        """Take in one step, as ``BatchPolicy.observe``. Return whether there is a new plan."""
        worked = np.isfinite(measured) & (batches > 0) & self._present
        unknown = np.full(self._cohort.size, np.nan)
        usage = unknown if busy is None else np.where(worked, 1 - busy, np.nan)
        more = self._usage.observe(usage, left)
        smaller = super().observe(batches, measured, busy, left)
        return self._resize({int(rank): self._proportional(int(rank)) for rank in more}) or smaller

    def _smaller(self, rank: int, _speed: float) -> float:
        return min(self._proportional(rank), float(self._own[rank]))

    def _proportional(self, rank: int) -> float:
        part = self._usage.part(rank)
        return float(self._own[rank] if math.isnan(part) else self._start[rank] * part)

    def join(self, rank: int, level: float = 1.0) -> BatchPlan:
        """Add a worker, new or returned, with its first batch. Return the plan with it."""
        self._usage.forget(rank)
        return super().join(rank, level)
