# SPDX-License-Identifier: Apache-2.0
"""Pure: synchronous training of a fleet, simulated: batch policies under changing loads, to 10,000 devices.

The simulation follows ``millpond.host.jobs.training.exchange_engine``. In each step, a free worker begins
with its batch, and a worker that sits out with one that no step waits for. The step ends when all others are
done, or at the deadline. A late worker goes on, its sums count in the step in which it is done, and it begins
again with as much as it can do in the rest of that step. The share of a processor that other work takes is
known from answers alone, and is that of when the batch began. The policy gets a step's late answers first,
and then the others: all at once, where the host reports each late answer by itself. Among few workers that is
the same, among 10,000 it takes no time. All steps are one epoch.

Exchange and optimizer are part of the curves; of workers on several hosts, the seconds of an ``exchange``
follow each step, as ``millpond.aggregate.levels`` predicts them, and late workers go on meanwhile. Time is
that of the simulation alone; the generator is seeded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from millpond.train.balance.controller import BatchPlan
from millpond.train.balance.curve import Bools, Floats, Ints
from millpond.train.balance.equal_time import LEAST_BATCH, Cohort

_SAFE = 0.9  # part of the batch that the rule of three gives for the rest of a step, as in the host


class BatchPolicy(Protocol):
    """Decides on batches, see ``policy``."""

    @property
    def plan(self) -> BatchPlan:
        """Return the present plan."""

    def observe(
        self, batches: Ints, measured: Floats, busy: Floats | None = None, left: float = 1.0, /
    ) -> bool:
        """Take in by rank the batch done last and its seconds, NaN for none, and the part of the processor
        that other work takes, NaN if unknown; and the part of the epoch that is ``left``. Return whether
        there is a new plan.
        """


@dataclass(frozen=True, slots=True)
class SimulatedLoads:
    """Other work on the devices: each is busy a ``busy`` part of the time, for ``lasting`` steps on average,
    and then ``least`` to ``most`` times as slow. Steps also vary by ``noise``, and the processor shares that
    devices report by ``busy_noise``, standard deviations.
    """

    busy: float = 0.1
    lasting: float = 100.0
    least: float = 2.0
    most: float = 4.0
    noise: float = 0.03
    busy_noise: float = 0.05

    def begin(self, size: int, source: np.random.Generator) -> Floats:
        """Return the slowness of each device at first."""
        return np.where(source.random(size) < self.busy, self._draw(size, source), 1.0)

    def change(self, slowness: Floats, source: np.random.Generator) -> Floats:
        """Return the slowness a step later."""
        ends = 1 / self.lasting
        begins = ends * self.busy / (1 - self.busy)
        chance = source.random(len(slowness))
        loaded = np.where(chance < begins, self._draw(len(slowness), source), slowness)
        return np.where(slowness > 1, np.where(chance < ends, 1.0, slowness), loaded)

    def reported(self, slowness: Floats, source: np.random.Generator) -> Floats:
        """Return the part of each processor that other work takes, as its operating system reports it."""
        return np.clip(1 - 1 / slowness + source.normal(0.0, self.busy_noise, len(slowness)), 0.0, 1.0)

    def _draw(self, size: int, source: np.random.Generator) -> Floats:
        return source.uniform(self.least, self.most, size)


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """The result of a simulation: ``counted`` are samples by rank whose sums went into a step, ``begun`` the
    samples of all begun batches; ``ideal`` is the sum of all available speeds over time, in samples;
    ``exchanged`` are the ``seconds`` of exchanges.
    """

    seconds: float
    ideal: float
    counted: Ints
    begun: Ints
    new_plans: int
    exchanged: float = 0.0

    @property
    def communication(self) -> float:
        """Return the part of the time that exchanges take."""
        return self.exchanged / self.seconds

    @property
    def speed(self) -> float:
        """Return the counted samples per second."""
        return float(self.counted.sum()) / self.seconds

    @property
    def share(self) -> float:
        """Return the counted samples as a part of the ideal."""
        return float(self.counted.sum()) / self.ideal

    @property
    def bias(self) -> float:
        """Return by which part the samples of the worst represented worker count too little."""
        worked = self.begun > 0
        return float(1 - np.min(self.counted[worked] / self.begun[worked]))


def simulate(
    cohort: Cohort, policy: BatchPolicy, loads: SimulatedLoads, steps: int, seed: int, exchange: float = 0.0
) -> SimulationOutcome:
    """Simulate a fleet in an epoch of so many steps, each with an ``exchange`` of so many seconds."""
    return _Simulation(cohort, policy, loads, seed, exchange).run(steps)


class _Simulation:
    def __init__(
        self, cohort: Cohort, policy: BatchPolicy, loads: SimulatedLoads, seed: int, exchange: float
    ) -> None:
        self._cohort, self._policy, self._loads, self._exchange = cohort, policy, loads, exchange
        self._source, self._report_noise = np.random.default_rng(seed), np.random.default_rng((seed, 1))
        self._slowness = loads.begin(cohort.size, self._source)
        self._speeds = np.array([kind.curve.speed for kind in cohort.kinds])[cohort.members]
        self._at = _Work.none(cohort.size)
        self._busy: Floats = np.full(cohort.size, np.nan)  # as far as it was reported
        self._counted, self._begun = np.zeros((2, cohort.size), dtype=np.int64)
        self._left = 1.0  # of the epoch

    def run(self, steps: int) -> SimulationOutcome:
        now, ideal, plans = 0.0, 0.0, 0
        for step in range(steps):
            self._left = 1 - (step + 1) / steps
            end, new_plan = self._step(now)
            end += self._exchange
            ideal += float((self._speeds / self._slowness).sum()) * (end - now)
            plans += new_plan
            self._slowness = self._loads.change(self._slowness, self._source)
            now = end
        exchanged = steps * self._exchange
        return SimulationOutcome(now, ideal, self._counted, self._begun, plans, exchanged)

    def _step(self, now: float) -> tuple[float, bool]:
        """Simulate the step that begins at ``now``. Return its end, and whether there is a new plan."""
        plan, at = self._policy.plan, self._at
        late = at.batches > 0
        fresh = self._begin(plan, now, late)
        end = _end(plan, now, _answers(at, fresh), fresh)
        came = late & (at.done <= end)
        began = (fresh.batches > 0) & (came | ~late)
        punctual = began & (fresh.done <= end)
        self._begun += np.where(began, fresh.batches, 0)
        self._counted += np.where(came, at.batches, 0)
        self._counted += np.where(punctual, fresh.batches, 0)
        self._at = fresh.where(began & ~punctual, at.without(came))
        return end, self._report(came, at) | self._report(punctual, fresh, always=True)

    def _begin(self, plan: BatchPlan, now: float, late: Bools) -> _Work:
        """Return the work that free workers begin now, and late workers when they are free."""
        begin = np.where(late, np.maximum(self._at.done, now), now)
        batches = np.where(late, _in_the_rest(plan, begin - now), _with_idle(plan.batches, self._cohort.caps))
        took = self._cohort.times(batches, self._slowness)
        took *= np.maximum(self._source.normal(1.0, self._loads.noise, self._cohort.size), 0.1)
        return _Work(batches, took, begin + took, self._loads.reported(self._slowness, self._report_noise))

    def _report(self, ranks: Bools, work: _Work, *, always: bool = False) -> bool:
        """Report the work of ``ranks``, a mask, to the policy. Return whether there is a new plan."""
        if not always and not ranks.any():
            return False
        np.copyto(self._busy, work.busy, where=ranks)
        return self._policy.observe(
            np.where(ranks, work.batches, 0),
            np.where(ranks, work.took, np.nan),
            self._busy.copy(),
            self._left,
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """Work in progress by rank: samples, 0 for none; seconds; time of its end; share of other work."""

    batches: Ints
    took: Floats
    done: Floats
    busy: Floats

    @staticmethod
    def none(size: int) -> _Work:
        return _Work(np.zeros(size, dtype=np.int64), np.zeros(size), np.zeros(size), np.zeros(size))

    def where(self, mine: Bools, other: _Work) -> _Work:
        """Return this work where the mask ``mine`` is set, the other elsewhere."""
        return _Work(
            np.where(mine, self.batches, other.batches),
            np.where(mine, self.took, other.took),
            np.where(mine, self.done, other.done),
            np.where(mine, self.busy, other.busy),
        )

    def without(self, ranks: Bools) -> _Work:
        return replace(self, batches=np.where(ranks, 0, self.batches))


def _answers(at: _Work, fresh: _Work) -> Floats:
    """Return the time of each worker's next answer, inf for none."""
    return np.where(at.batches > 0, at.done, np.where(fresh.batches > 0, fresh.done, np.inf))


def _end(plan: BatchPlan, now: float, answers: Floats, fresh: _Work) -> float:
    """Return when all batches of the plan are done, or the deadline; not before the first answer."""
    first = float(answers.min())
    awaited = fresh.done[plan.batches > 0]
    return max(now, min(float(awaited.max(initial=first)), max(now + plan.deadline, first)))


def _in_the_rest(plan: BatchPlan, gone: Floats) -> Ints:
    """Return the part of each batch that fits in after ``gone`` seconds of the step; 0 if too little."""
    planned = float(plan.times.max())
    left = 1 - gone / planned if planned else np.zeros_like(gone)
    batches = (_SAFE * left * plan.batches).astype(np.int64)
    return np.where(batches >= LEAST_BATCH, batches, 0)


def _with_idle(batches: Ints, caps: Ints) -> Ints:
    """Give workers that sit out an equal part of a step, as far as their memory takes it."""
    equal = max(LEAST_BATCH, int(batches.sum()) // len(batches))
    return np.where(batches > 0, batches, np.minimum(caps, equal))
