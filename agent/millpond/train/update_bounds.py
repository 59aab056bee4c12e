# SPDX-License-Identifier: Apache-2.0
"""Pure: which updates and scores of workers count."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from millpond.aggregate.unrepaired import BOUND
from millpond.train.job.spec import Job, WorkSpec
from millpond.train.protocol import Update, Work

NOT_FINITE = "is not finite"
"""Part of the reason for refusing an update whose values are out of range."""
MOST_STEP = 100.0
"""The most that one local step counts where differences are normalized: with a momentum of 0.99."""


def not_finite(value: float) -> str:
    """Return the name of a value that is not finite."""
    return "NaN" if math.isnan(value) else "infinite"


@dataclass(frozen=True, slots=True)
class UpdateBounds:
    """The bounds of one worker's answers: its loss and metrics count at most ``most_count`` per sample, its
    updates weigh at most ``most_weight`` per sample, and it holds out ``held_out`` samples. Local steps of
    normalized differences are bounded by those of ``normalized``. An exchange is a ``unit``.
    """

    most_count: float = math.inf
    held_out: int = 1 << 62
    most_weight: float = math.inf
    normalized: WorkSpec | None = None
    unit: Literal["step", "round"] = "step"

    @classmethod
    def of(cls, job: Job, held_out: int, *, normalized: bool = False) -> UpdateBounds:
        """Return the bounds of a worker of a job. Only the gradients of a task weigh what its loss counts:
        differences weigh their samples, and the built-in loss counts samples.
        """
        counts = job.task is not None and not job.exchanges_differences
        weight = math.inf if counts else 1.0
        unit: Literal["step", "round"] = "step" if job.synchronous else "round"
        return cls(job.limits.most_count, held_out, weight, job.work if normalized else None, unit)

    def refusal(self, request: Work, update: Update) -> str:
        """Return why an answer does not count, "" if it does."""
        if not 0 <= update.seconds < math.inf:
            return "its seconds are negative, or not finite"
        if fault := update.data.fault:
            return fault
        return self._of_score(update) if request.held_out else self._of_update(request, update)

    def _of_update(self, request: Work, update: Update) -> str:
        samples, where = request.samples, f"in {self.unit} {request.exchange}"
        figures = itertools.chain(*update.metrics.values())
        if (odd := next((figure for figure in figures if not math.isfinite(figure)), None)) is not None:
            return f"its loss {NOT_FINITE} ({not_finite(odd)}) {where}"
        if not (math.isfinite(update.largest) and math.isfinite(update.norm)):
            return f"a value {NOT_FINITE} (NaN or infinite) {where}"
        if not 0 <= update.shift < math.inf:
            return f"a buffer, such as a running statistic, {NOT_FINITE} (NaN or infinite) {where}"
        if not 0 <= update.largest <= BOUND * max(samples, update.weight):
            return f"a value is beyond {BOUND:g} per sample {where}"
        if not 0 <= update.weight <= self.most_count * samples:
            return f"its loss counts {update.weight:g} of {samples} samples (limits.most_count)"
        if update.weight > self.most_weight * samples:
            return f"it weighs {update.weight:g}, and is of {samples} samples"
        work = self.normalized
        most = 1.0 if work is None else MOST_STEP * work.most_local_steps(samples)
        if not 0 < update.local_steps <= most:
            return f"it claims {update.local_steps:g} local steps; at most {most:g} are possible"
        return ""

    def _of_score(self, update: Update) -> str:
        """Check a score, in which figures that are not finite are no fault."""
        if not 0 <= update.samples <= self.held_out:
            return f"its score is of {update.samples} samples; it holds out {self.held_out}"
        for name, (_, count) in update.metrics.items():
            if not 0 <= count <= self.most_count * max(update.samples, 1):
                return f"its {name} counts {count:g} of {update.samples} samples (limits.most_count)"
        return ""
