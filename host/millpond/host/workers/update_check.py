# SPDX-License-Identifier: Apache-2.0
"""Pure: which updates and scores of workers count."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from millpond.host.model.failures import NOT_FINITE
from millpond.train.job.spec import Job
from millpond.train.protocol import Update, Work

BOUND = 65536.0
"""The largest value per sample of an update that counts."""


@dataclass(frozen=True, slots=True)
class UpdateBounds:
    """The bounds of one worker's answers: its loss and metrics count at most ``most_count`` per sample, its
    updates weigh at most ``most_weight`` per sample, and it holds out ``held_out`` samples.
    """

    most_count: float = math.inf
    held_out: int = 1 << 62
    most_weight: float = math.inf

    @classmethod
    def of(cls, job: Job, held_out: int) -> UpdateBounds:
        """Return the bounds of a worker of a job. Only the gradients of a task weigh what its loss counts:
        differences weigh their samples, and the built-in loss counts samples.
        """
        counts = job.task is not None and not job.exchanges_differences
        return cls(job.limits.most_count, held_out, math.inf if counts else 1.0)

    def refusal(self, request: Work, update: Update) -> str:
        """Return why an answer does not count, "" if it does."""
        if not math.isfinite(update.seconds):
            return "its seconds are not finite"
        return self._of_score(update) if request.held_out else self._of_update(request, update)

    def _of_update(self, request: Work, update: Update) -> str:
        samples = request.samples
        largest = BOUND * max(samples, update.weight)
        if not 0 <= update.largest <= largest or not math.isfinite(update.norm):
            return f"a value {NOT_FINITE}, or beyond {BOUND:g} per sample"
        if not 0 <= update.weight <= self.most_count * samples:
            return f"its loss counts {update.weight:g} of {samples} samples (limits.most_count)"
        if update.weight > self.most_weight * samples:
            return f"it weighs {update.weight:g}, and is of {samples} samples"
        if not all(map(math.isfinite, itertools.chain(*update.metrics.values()))):
            return f"its loss or another metric {NOT_FINITE}"
        return ""

    def _of_score(self, update: Update) -> str:
        """Check a score, in which figures that are not finite are no fault."""
        if not 0 <= update.samples <= self.held_out:
            return f"its score is of {update.samples} samples; it holds out {self.held_out}"
        for name, (_, count) in update.metrics.items():
            if not 0 <= count <= self.most_count * max(update.samples, 1):
                return f"its {name} counts {count:g} of {update.samples} samples (limits.most_count)"
        return ""
