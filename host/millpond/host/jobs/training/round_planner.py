# SPDX-License-Identifier: Apache-2.0
"""Pure: the plan of rounds: each chosen worker trains on all its samples, up to a deadline.

A deadline of "auto" follows the workers: the median of their last seconds plus SPREADS times their spread,
which is 1.4826 times the median absolute deviation (the standard deviation of normal numbers, but a few
stragglers do not move it). It is at least LEAST_TIMES the median: few workers have hardly a spread. If more
than half of the workers miss it, as when all have become slower, the next one is twice as long, up to LONGEST
times. So is one that is set in seconds, which no round might ever meet; it stays as long. An asynchronous
exchange, which ends with the first few answers, says nothing of the deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from millpond.host.jobs.training.epoch import round_summary
from millpond.host.jobs.training.membership import Membership
from millpond.host.jobs.training.shards import WholeShards
from millpond.host.records.jobs import Round
from millpond.train.balance.controller import BatchPlan
from millpond.train.balance.curve import Floats, Ints
from millpond.train.determinism import seeds
from millpond.train.job.spec import Job

if TYPE_CHECKING:
    from millpond.host.jobs.training.exchange_engine import ExchangeOutcome

FIRST_DEADLINE = 60.0
"""Seconds of an automatic deadline at least, until two workers have been measured."""
SPREADS, LEAST_TIMES, LEAST_SECONDS = 5.0, 2.0, 1.0
LONGEST = 8.0
"""Times its length that a deadline becomes at most."""


class RoundPlanner:
    """Plans rounds of ``deadline`` seconds for ``names``, by rank; ``choose`` may leave workers out. With a
    ``buffer`` rounds are asynchronous exchanges.
    """

    def __init__(self, names: Sequence[str], deadline: float | Literal["auto"], buffer: int = 0) -> None:
        self._names, self._fixed = names, None if deadline == "auto" else deadline
        self._samples: Ints = np.zeros(len(names), np.int64)
        self._seconds: Floats = np.full(len(names), np.nan)
        self._factor, self._longest = 1.0, 1.0 if buffer else LONGEST
        self.most_late = False
        """Whether most workers have missed the last deadline, so that the next one is longer."""
        self.left_out: list[int] = []

    @property
    def deadline(self) -> float:
        """The seconds of the next round."""
        if self._fixed is not None:
            return self._factor * self._fixed
        return self._factor * automatic_deadline(self._seconds[~np.isnan(self._seconds)])

    @property
    def plan(self) -> BatchPlan:
        """All samples of the present workers that are not left out."""
        batches = self._samples.copy()
        batches[self.left_out] = 0
        return BatchPlan(batches, np.zeros(len(self._names)), self.deadline)

    def choose(self, left_out: Sequence[int]) -> None:
        """Leave these workers out of the next round."""
        self.left_out = list(left_out)

    @property
    def background(self) -> Ints:
        """None: no worker is too slow to be asked."""
        return np.zeros(len(self._names), np.int64)

    def join(self, rank: int, samples: int) -> None:
        """Add a present worker with its samples."""
        self._samples[rank] = samples

    def leave(self, rank: int) -> None:
        """Remove a worker."""
        self._samples[rank] = 0
        self._seconds[rank] = np.nan

    def observe(
        self, batches: Ints, measured: Floats, _busy: Floats | None = None, _left: float = 1.0, /
    ) -> bool:
        """Take the seconds of a round, NaN for workers without an answer; without a batch it was late. There
        is never a new plan.
        """
        asked = self.plan.batches > 0
        answered = asked & ~np.isnan(measured)
        self._seconds[answered] = measured[answered]
        most_late = bool(2 * (answered & (batches > 0)).sum() < asked.sum())
        self.most_late = most_late and self._factor < self._longest
        if self.most_late:
            self._factor *= 2
        elif self._fixed is None and not most_late:
            self._factor = 1.0
        return False

    @property
    def description(self) -> str:
        """The plan in one line."""
        found = zip(self._names, self._samples.tolist(), strict=True)
        return ", ".join(f"{name} {samples} samples" for name, samples in found if samples)


class RoundSchedule:
    """Schedules rounds of a job: each is an epoch of one exchange, in which the devices that were chosen for
    it train on all of their samples.
    """

    unit, epoch, is_epoch = "round", "round", True
    """The names of an exchange and an epoch, and whether both are the same."""

    def __init__(self, job: Job, names: Sequence[str]) -> None:
        self._spec, self._seed, self._names = job.averaging, job.seed, names
        self._unasked: Collection[int] = ()
        self.shards = WholeShards(len(names))
        self.planner = RoundPlanner(names, self._spec.deadline, self._spec.buffer)

    @property
    def most_late(self) -> bool:
        """Whether the next exchange is longer, since most workers have missed the last one's deadline."""
        return self.planner.most_late

    def choose(self, number: int, membership: Membership[Any]) -> Callable[[Sequence[int]], bool]:
        """Choose the devices of a round. Returns whether given ranks are enough for it to count."""
        spec, devices = self._spec, membership.joined_devices
        chosen = selected(devices, spec.fraction, spec.least, self._seed, number)
        self.planner.choose([rank for rank in devices if rank not in chosen])
        self._unasked = {*self.planner.left_out, *(membership.joined if spec.buffer else ())}
        if spec.buffer:
            return lambda _ranks: membership.is_quorum(membership.joined)
        asked = None if spec.fraction == 1.0 else chosen
        return lambda ranks: membership.is_quorum(ranks, asked)

    def factors(self, outcome: ExchangeOutcome) -> tuple[float, float]:
        """Return the factors of a round's mean and of the mean of its buffers."""
        return outcome.local_steps, 1.0

    def missing(self, counted: Collection[str], reason: Callable[[int], str]) -> dict[str, str]:
        """Return by name why workers took no part in the last round, but of those whose absence says nothing
        of them.
        """
        absent = {
            name: reason(rank)
            for rank, name in enumerate(self._names)
            if rank not in self._unasked and name not in counted
        }
        return dict(sorted(absent.items()))

    def described(self, result: Round) -> tuple[str, list[str]]:
        """Return a recorded round as text, and a text for each worker that is missing."""
        missing = result.missing.items()
        goes_on = f"round {result.round} goes on without"
        return round_summary(result), [f"{goes_on} {name}: {reason}" for name, reason in missing]


def automatic_deadline(seconds: Floats) -> float:
    """Return the deadline for workers that took ``seconds``, see the module."""
    if len(seconds) < 2:
        return max(FIRST_DEADLINE, LEAST_TIMES * float(seconds.max(initial=0.0)))
    middle = float(np.median(seconds))
    spread = 1.4826 * float(np.median(np.abs(seconds - middle)))
    return max(middle + SPREADS * spread, LEAST_TIMES * middle, LEAST_SECONDS)


def selected(devices: Sequence[int], fraction: float, least: int, seed: int, number: int) -> list[int]:
    """Return the devices of round ``number``: ``fraction`` of them, rounded up, but at least ``least``. The
    choice follows from the arguments; every device is as likely as any other.
    """
    wanted = min(len(devices), max(least, math.ceil(fraction * len(devices) - 1e-9)))
    if wanted == len(devices):
        return list(devices)
    key = seeds.derive(seed, "selection", number)
    chosen = np.random.Generator(np.random.Philox(key=key)).permutation(len(devices))[:wanted]
    return sorted(devices[index] for index in chosen.tolist())
