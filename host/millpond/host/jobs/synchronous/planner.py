"""Pure: the plan of those workers of a job who are there, whoever comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from millpond.train.balance.controller import BatchPlan, deadline_of
from millpond.train.balance.curve import Floats, Ints
from millpond.train.balance.equal_time import LEAST_BATCH, Cohort, Measured, kinds_of
from millpond.train.balance.policy import Elastic, policy_of
from millpond.train.balance.profiling import Profile
from millpond.train.job.spec import SynchronousSpec


class Planner:
    """A policy for all of ``names``, by rank: for those whose curves are known, as far as they are there.

    What all can do at the same time is more than a step is to have, or more than some have samples for:
    ``spread`` makes batches smaller, to so many samples together, as the data that are left want it.
    """

    def __init__(
        self, how: SynchronousSpec, names: Sequence[str], spread: Callable[[Ints, int], Ints] | None = None
    ) -> None:
        self._how, self._names, self._spread = how, names, spread
        self._measured: dict[int, Measured] = {}
        self._there: set[int] = set()
        self._known: list[int] = []  # ranks in the order of the policy
        self._own_levels: dict[int, float] = {}
        self._policy: Elastic | None = None
        self._samples = 0
        self._caps: Ints = np.zeros(0, np.int64)

    @property
    def plan(self) -> BatchPlan:
        """See Policy. Nobody has a batch while nobody is there."""
        batches, times = np.zeros(len(self._names), np.int64), np.zeros(len(self._names))
        if self._policy is None:
            return BatchPlan(batches, times, 0.0)
        plan = self._policy.plan
        batches[self._known], times[self._known] = plan.batches, plan.times
        if self._spread is None:
            return replace(plan, batches=batches, times=times)
        batches = self._spread(batches, self._wanted)
        times[self._known] = self._crew.times(batches[self._known], self._policy.slowness)
        forever = plan.deadline == float("inf")
        return BatchPlan(batches, times, plan.deadline if forever else deadline_of(times, self._how.patience))

    def join(self, rank: int, profile: Profile, most: int, samples: int) -> None:
        """A worker is there, and has memory for a batch of ``most``; the job has ``samples`` in all."""
        points = tuple((point.batch, point.seconds) for point in profile.points)
        measured, known = Measured(profile.kind, points, most), self._measured.get(rank)
        self._there.add(rank)
        self._samples = samples
        if self._policy is not None and known == measured:
            self._policy.join(self._known.index(rank), self._own_levels[rank])
        else:
            self._measured[rank] = measured
            self._make()

    def leave(self, rank: int) -> None:
        """It is not there any more."""
        if self._policy is not None and rank in self._there:
            self._there.remove(rank)
            self._policy.leave(self._known.index(rank))

    @property
    def rest(self) -> Ints:
        """By rank, the batches of those who are too slow to have one in the plan: an equal part of a step, in
        which nobody waits for them. So their own samples are not left to the end of the epoch, and it is seen
        when they are faster again.
        """
        rest = np.zeros(len(self._names), np.int64)
        if self._policy is not None:
            batches = self._policy.plan.batches
            equal = max(LEAST_BATCH, int(batches.sum()) // max(1, len(self._there)))
            sit_out = (batches == 0) & [rank in self._there for rank in self._known]
            rest[self._known] = np.where(sit_out, np.minimum(self._caps, equal), 0)
        return rest

    def observe(self, batches: Ints, measured: Floats, busy: Floats | None = None, /) -> bool:
        """See Policy."""
        if self._policy is None:
            return False
        busy = None if busy is None else busy[self._known]
        seconds, batches = measured[self._known], batches[self._known]
        # A batch from a former plan that is larger than any by the present curves tells nothing of these.
        seconds = np.where(batches > self._caps + 1, np.nan, seconds)
        return self._policy.observe(np.where(np.isnan(seconds), 0, batches), seconds, busy)

    @property
    def described(self) -> str:
        """The plan in one line: seconds of a step, each one's batch and share, samples per second."""
        plan, slowness = self.plan, self._slowness()
        seconds, total = float(plan.times.max(initial=0.0)), int(plan.batches.sum())
        if not total:
            return "nobody has time for two samples"
        parts = []
        for rank in sorted(self._there):
            batch, slow = int(plan.batches[rank]), slowness.get(rank, 1.0)
            does = f"{batch} samples ({batch / total:.0%})" if batch else "sits out"
            parts.append(f"{self._names[rank]} {does}{f', {slow:.2f} times as slow' if slow > 1.05 else ''}")
        speed = total / seconds
        return f"a step of {total} samples takes {seconds:.3f} s, {speed:.1f} per second: {'; '.join(parts)}"

    @property
    def _wanted(self) -> int:
        """The samples of a step, if all together can do so many."""
        return self._how.global_batch or max(LEAST_BATCH, self._samples // self._how.steps)

    def _total(self) -> int | None:
        """A global batch that is fixed, and more than the workers like: as near to it as they come."""
        wanted, everyone = self._how.global_batch, np.ones(self._crew.size)
        liked = self._crew.batches(self._crew.step_seconds(everyone), everyone).sum()
        if wanted is None or (self._spread is not None and wanted <= liked):
            return None
        return self._crew.nearest(wanted, everyone > 0) or None

    def _slowness(self) -> dict[int, float]:
        if self._policy is None:
            return {}
        return dict(zip(self._known, self._policy.slowness.tolist(), strict=True))

    def _make(self) -> None:
        """Anew, with one more curve; what is known of the others' slowness is kept."""
        before = self._slowness()
        self._known = sorted(self._measured)
        kinds, members, levels = kinds_of([self._measured[rank] for rank in self._known])
        self._own_levels = dict(zip(self._known, levels, strict=True))
        kept = [before.get(rank, own) for rank, own in self._own_levels.items()]
        self._crew = Cohort(kinds, members)
        self._caps = self._crew.caps
        self._policy = policy_of(
            self._how.policy,
            self._crew,
            self._total(),
            self._how.patience or None,
            levels=np.array(kept),
            present=np.array([rank in self._there for rank in self._known]),
            probes=False,  # who sits out works beside the plan, and is measured so
        )
