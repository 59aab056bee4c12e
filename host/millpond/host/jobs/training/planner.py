# SPDX-License-Identifier: Apache-2.0
"""Pure: the batch plan of the present workers of a job, as workers join and leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from millpond.host.jobs.training.epoch import summary
from millpond.host.jobs.training.membership import Membership
from millpond.host.jobs.training.shards import Shards
from millpond.host.records.jobs import Round
from millpond.train.balance.controller import BatchPlan, deadline_of
from millpond.train.balance.curve import Floats, Ints
from millpond.train.balance.equal_time import LEAST_BATCH, SHORTEST, Cohort, Measured, kinds_of
from millpond.train.balance.policy import Elastic, policy_of
from millpond.train.balance.profiling import Profile
from millpond.train.job.spec import SynchronousSpec

if TYPE_CHECKING:
    from millpond.host.jobs.training.exchange_engine import ExchangeOutcome


class Planner:
    """Plans batches for ``names``, by rank: runs a policy over the workers whose curves are known, of which
    only the present ones have batches.

    The policy's batches together may exceed the samples that a step is to have, or those that a worker can
    still read: ``spread`` reduces them to a total, as the remaining data permit.
    """

    def __init__(
        self, spec: SynchronousSpec, names: Sequence[str], spread: Callable[[Ints, int], Ints] | None = None
    ) -> None:
        self._spec, self._names, self._spread = spec, names, spread
        self._measured: dict[int, Measured] = {}
        self._present: set[int] = set()
        self._known: list[int] = []  # ranks in the order of the policy
        self._own_levels: dict[int, float] = {}
        self._policy: Elastic | None = None
        self._samples = 0
        self._caps: Ints = np.zeros(0, np.int64)

    @property
    def plan(self) -> BatchPlan:
        """The present plan by rank, as BatchPolicy.plan. All batches are 0 while no worker is present."""
        batches, times = np.zeros(len(self._names), np.int64), np.zeros(len(self._names))
        if self._policy is None:
            return BatchPlan(batches, times, 0.0)
        plan = self._policy.plan
        batches[self._known], times[self._known] = plan.batches, plan.times
        if self._waits_for_all:
            batches += self._equal_parts(int(plan.batches.sum()))
        elif self._spread is None:
            return replace(plan, batches=batches, times=times)
        if self._spread is not None:
            batches = self._spread(batches, self._target)
        times[self._known] = self._cohort.times(batches[self._known], self._policy.slowness)
        deadline = plan.deadline if self._waits_for_all else deadline_of(times, self._spec.patience)
        return BatchPlan(batches, times, deadline)

    def join(self, rank: int, profile: Profile, most: int, samples: int, least: int = LEAST_BATCH) -> None:
        """Add a present worker, whose memory takes batches up to ``most``, and whose samples come in batches
        of up to ``least``, however small its part is; the job has ``samples`` in all.
        """
        points = tuple((point.batch, point.seconds) for point in profile.points)
        measured, known = Measured(profile.kind, points, most, least), self._measured.get(rank)
        self._present.add(rank)
        self._samples = samples
        if self._policy is not None and known == measured:
            self._policy.join(self._known.index(rank), self._own_levels[rank])
        else:
            self._measured[rank] = measured
            self._rebuild(rank)

    def leave(self, rank: int) -> None:
        """Remove a worker from the present ones; its curve stays known."""
        if self._policy is not None and rank in self._present:
            self._present.remove(rank)
            self._policy.leave(self._known.index(rank))

    @property
    def background(self) -> Ints:
        """Batches, by rank, for workers too slow to have one in the plan: an equal part of a step, computed
        in the background. So their own samples are not left to the end of the epoch, and a worker that
        becomes fast again is noticed. Steps that wait for all workers have no background: there these batches
        are in the plan, and so in its total.
        """
        if self._policy is None or self._waits_for_all:
            return np.zeros(len(self._names), np.int64)
        return self._equal_parts(min(int(self._policy.plan.batches.sum()), self._target))

    @property
    def _waits_for_all(self) -> bool:
        return self._policy is not None and self._policy.plan.deadline == float("inf")

    def _equal_parts(self, samples: int) -> Ints:
        """Return an equal part of a step of ``samples`` for each present worker without a batch in the
        policy's plan.
        """
        parts = np.zeros(len(self._names), np.int64)
        if self._policy is not None:
            equal = max(LEAST_BATCH, samples // max(1, len(self._present)))
            sit_out = (self._policy.plan.batches == 0) & [rank in self._present for rank in self._known]
            parts[self._known] = np.where(sit_out, np.minimum(self._caps, equal), 0)
        return parts

    def observe(
        self, batches: Ints, measured: Floats, busy: Floats | None = None, left: float = 1.0, /
    ) -> bool:
        """Report measured seconds to the policy, as BatchPolicy.observe. Returns whether the plan is new."""
        if self._policy is None:
            return False
        busy = None if busy is None else busy[self._known]
        seconds, batches = measured[self._known], batches[self._known]
        # A batch from a former plan that is larger than any by the present curves says nothing about these.
        seconds = np.where(batches > self._caps + 1, np.nan, seconds)
        return self._policy.observe(np.where(np.isnan(seconds), 0, batches), seconds, busy, left)

    @property
    def description(self) -> str:
        """The plan in one line: seconds of a step and samples per second, unless it is too short;
        each worker's batch and share.
        """
        plan, slowness = self.plan, self._slowness()
        seconds, total = float(plan.times.max(initial=0.0)), int(plan.batches.sum())
        if not total and self._policy is not None and self._policy.plan.batches.any():
            return "no sample of this epoch is left for it"
        if not total:
            return "nobody has time for two samples"
        parts = []
        for rank in sorted(self._present):
            batch, slow = int(plan.batches[rank]), slowness.get(rank, 1.0)
            does = f"{batch} samples ({batch / total:.0%})" if batch else "sits out"
            parts.append(f"{self._names[rank]} {does}{f', {slow:.2f} times as slow' if slow > 1.05 else ''}")
        told = f"{seconds:.3f} s, {total / seconds:.1f} per second"
        if seconds < SHORTEST:
            told = f"less than {SHORTEST} s"
        return f"a step of {total} samples takes {told}: {'; '.join(parts)}"

    @property
    def _target(self) -> int:
        """The samples of a step, if all workers together can compute so many."""
        return self._spec.global_batch or max(LEAST_BATCH, self._samples // self._spec.steps)

    def _total(self) -> int | None:
        """Return the total that the policy's batches must meet: a fixed global batch, or the nearest that the
        workers can compute; None where ``spread`` only has to reduce the batches.
        """
        wanted, everyone = self._spec.global_batch, np.ones(self._cohort.size)
        liked = self._cohort.batches(self._cohort.step_seconds(everyone), everyone).sum()
        if wanted is None or (self._spread is not None and wanted <= liked):
            return None
        return self._cohort.nearest(wanted, everyone > 0) or None

    def _slowness(self) -> dict[int, float]:
        if self._policy is None:
            return {}
        return dict(zip(self._known, self._policy.slowness.tolist(), strict=True))

    def _rebuild(self, joining: int) -> None:
        """Build the policy anew with one more curve, and keep the known slowness of the other workers, which
        is relative to their own curves: the curve of their kind may be another than before.
        """
        slower = {rank: slow / self._own_levels[rank] for rank, slow in self._slowness().items()}
        slower.pop(joining, None)
        self._known = sorted(self._measured)
        kinds, members, levels = kinds_of([self._measured[rank] for rank in self._known])
        self._own_levels = dict(zip(self._known, levels, strict=True))
        kept = [slower.get(rank, 1.0) * own for rank, own in self._own_levels.items()]
        self._cohort = Cohort(kinds, members)
        self._caps = self._cohort.caps
        self._policy = policy_of(
            self._spec.policy,
            self._cohort,
            self._total(),
            self._spec.patience or None,
            levels=np.array(kept),
            present=np.array([rank in self._present for rank in self._known]),
            probes=False,  # a worker without a batch computes in the background, and is measured so
        )


class StepSchedule:
    """Schedules synchronous steps: each takes a batch of every worker, until an epoch's samples are used."""

    unit, epoch, is_epoch = "step", "epoch", False
    """The names of an exchange and an epoch, and whether both are the same."""
    most_late = False
    """A step's deadline follows from its plan alone."""

    def __init__(self, spec: SynchronousSpec, names: Sequence[str]) -> None:
        self.shards = Shards(len(names))
        self.planner = Planner(spec, names, self.shards.spread)

    def choose(self, _number: int, _membership: Membership[Any]) -> Callable[[Sequence[int]], bool]:
        """Return whether given ranks are enough for a step to count: any are."""
        return bool

    def factors(self, outcome: ExchangeOutcome) -> tuple[float, float]:
        """Return the factors of a step's mean and of the mean of its buffers. All samples weigh the
        same: a step without late samples moves less, the step that counts them more. Buffers move as far, but
        never beyond the values that updates have led to.
        """
        factor = outcome.samples / outcome.whole
        return factor, min(factor, 1.0)

    def missing(self, _counted: Collection[str], _reason: Callable[[int], str]) -> dict[str, str]:
        """Return by device the samples of an epoch that are left."""
        texts: dict[str, list[str]] = {}
        for shard, count in self.shards.left.items():
            texts.setdefault(shard.source, []).append(f"{count} {shard.name} were left")
        return {source: ", ".join(parts) for source, parts in texts.items()}

    def described(self, result: Round) -> tuple[str, list[str]]:
        """Return a recorded epoch as text, and a text for each part of it that is missing."""
        return summary(result), [f"epoch {result.round}: {text}" for text in result.missing.values()]
