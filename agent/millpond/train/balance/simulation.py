"""Pure: a fleet in lock step, simulated: what policies make of loads that come and go, to 10,000 devices.

Each step, who is free begins with its batch; the step ends when all are done, or at the deadline. Who is late
goes on, its sums count in the step in which it is done, and it begins its next batch then. Exchange and
optimizer are part of the curves. Time is that of the simulation alone; the generator is seeded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from millpond.train.balance.controller import Plan
from millpond.train.balance.curve import Bools, Floats, Ints
from millpond.train.balance.equal_time import Crew


class Policy(Protocol):
    """What decides on batches, see ``policies``."""

    @property
    def plan(self) -> Plan:
        """The present one."""

    def observe(self, batches: Ints, measured: Floats, busy: Floats | None = None, /) -> bool:
        """By rank what was done last and its seconds, NaN for nothing, and the part of the processor that
        other work takes, NaN if unknown. Whether there is a new plan.
        """


@dataclass(frozen=True, slots=True)
class Loads:
    """Other work on the devices: each is busy a ``busy`` part of the time, for ``lasting`` steps on average,
    and then ``least`` to ``most`` times as slow. Steps also vary by ``noise``, and what devices tell of their
    processors by ``busy_noise``, standard deviations.
    """

    busy: float = 0.1
    lasting: float = 100.0
    least: float = 2.0
    most: float = 4.0
    noise: float = 0.03
    busy_noise: float = 0.05

    def begin(self, size: int, source: np.random.Generator) -> Floats:
        """How slow each is at first."""
        return np.where(source.random(size) < self.busy, self._draw(size, source), 1.0)

    def change(self, slowness: Floats, source: np.random.Generator) -> Floats:
        """A step later."""
        ends = 1 / self.lasting
        begins = ends * self.busy / (1 - self.busy)
        chance = source.random(len(slowness))
        loaded = np.where(chance < begins, self._draw(len(slowness), source), slowness)
        return np.where(slowness > 1, np.where(chance < ends, 1.0, slowness), loaded)

    def told(self, slowness: Floats, source: np.random.Generator) -> Floats:
        """The part of each processor that other work takes, as its operating system tells."""
        return np.clip(1 - 1 / slowness + source.normal(0.0, self.busy_noise, len(slowness)), 0.0, 1.0)

    def _draw(self, size: int, source: np.random.Generator) -> Floats:
        return source.uniform(self.least, self.most, size)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a simulation: ``counted`` are samples by rank whose sums went into a step, ``begun`` those that were
    to; ``ideal`` is what all speeds that were there add up to.
    """

    seconds: float
    ideal: float
    counted: Ints
    begun: Ints
    new_plans: int

    @property
    def speed(self) -> float:
        """Samples per second."""
        return float(self.counted.sum()) / self.seconds

    @property
    def share(self) -> float:
        """Of the ideal."""
        return float(self.counted.sum()) / self.ideal

    @property
    def bias(self) -> float:
        """By which part the samples of the worst represented worker count too little."""
        worked = self.begun > 0
        return float(1 - np.min(self.counted[worked] / self.begun[worked]))


def simulate(
    crew: Crew, policy: Policy, loads: Loads, steps: int, seed: int, *, carry: bool = True
) -> Outcome:
    """Without ``carry``, late sums are thrown away, as in training with backup workers."""
    return _Simulation(crew, policy, loads, seed, carry).run(steps)


class _Simulation:
    def __init__(self, crew: Crew, policy: Policy, loads: Loads, seed: int, carry: bool) -> None:
        self._crew, self._policy, self._loads, self._carry = crew, policy, loads, carry
        self._source, self._telling = np.random.default_rng(seed), np.random.default_rng((seed, 1))
        self._slowness = loads.begin(crew.size, self._source)
        self._speeds = np.array([kind.curve.speed for kind in crew.kinds])[crew.members]
        self._at: Ints = np.zeros(crew.size, dtype=np.int64)  # samples of the batch that each is late with
        self._took, self._until = np.zeros(crew.size), np.zeros(crew.size)  # its seconds, and when it is done
        self._counted, self._begun = np.zeros_like(self._at), np.zeros_like(self._at)

    def run(self, steps: int) -> Outcome:
        now, ideal, plans = 0.0, 0.0, 0
        for _ in range(steps):
            end, batches, seconds = self._step(now)
            ideal += float((self._speeds / self._slowness).sum()) * (end - now)
            busy = self._loads.told(self._slowness, self._telling)
            plans += self._policy.observe(batches, seconds, busy)
            self._slowness = self._loads.change(self._slowness, self._source)
            now = end
        return Outcome(now, ideal, self._counted, self._begun, plans)

    def _step(self, now: float) -> tuple[float, Ints, Floats]:
        """When it ends, and what each worker did last in it."""
        plan = self._policy.plan
        took = self._crew.times(plan.batches, self._slowness)
        took *= np.maximum(self._source.normal(1.0, self._loads.noise, self._crew.size), 0.1)
        begin = np.maximum(self._until, now)
        begins = (plan.batches > 0) & (begin < now + plan.deadline)
        done_at = np.where(begins, begin + took, self._until)
        end = min(float(done_at.max()), now + plan.deadline)
        late = (self._at > 0) & (self._until <= end)
        self._count(late if self._carry else np.zeros_like(late), self._at)
        punctual = begins & (done_at <= end)
        self._count(punctual, plan.batches)
        self._begun += np.where(begins, plan.batches, 0)
        batches = np.where(punctual, plan.batches, self._at)
        seconds = np.where(punctual, took, np.where(late, self._took, np.nan))
        self._at = np.where(begins, np.where(punctual, 0, plan.batches), np.where(late, 0, self._at))
        self._took, self._until = np.where(begins, took, self._took), done_at
        return end, batches, seconds

    def _count(self, who: Bools, batches: Ints) -> None:
        self._counted += np.where(who, batches, 0)
