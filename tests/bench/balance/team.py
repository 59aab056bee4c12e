# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): runs virtual workers in lock step under the host's own engine and policies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from bench.balance.paper import Machine
from bench.balance.virtual import GRADIENT, SIZE, VirtualWorker
from bench.experiment import Role
from millpond.host.jobs.training.exchange_engine import ExchangeEngine
from millpond.host.jobs.training.planner import Planner
from millpond.host.jobs.training.roster import JobRoster
from millpond.host.workers.dispatcher import Dispatcher
from millpond.host.workers.worker import ModelState
from millpond.linux import memory
from millpond.train.balance.policy import PolicyName
from millpond.train.balance.profiling import Point, Profile
from millpond.train.balance.ranges import Ranges
from millpond.train.job.spec import SynchronousSpec

POLICIES: Mapping[PolicyName, str] = {"balance": "", "stannis": "_stannis", "fixed": "_untuned"}
"""What the keys of figures end with."""
LABELS: Mapping[PolicyName, str] = {
    "balance": "millpond",
    "stannis": "the paper's rule",
    "stannis-inverse": "the paper's first method",
    "stannis-cpu": "the paper's third method",
    "fixed": "untuned",
}
ROLES: Mapping[PolicyName, Role] = {
    "balance": "millpond",
    "stannis": "stannis",
    "stannis-inverse": "stannis",
    "stannis-cpu": "peer",
    "fixed": "untuned",
}
_PLENTY = 1 << 40  # samples of an epoch

Key = TypeVar("Key")
Found = TypeVar("Found")


def emulation(factor: float, planned: float) -> str:
    """What is virtual; ``factor`` of time, and the ``planned`` seconds of a step on this machine's clock."""
    return (
        "virtual: workers are threads of one process that sleep for their curve's time, "
        f"{1 / factor:.1f} times as fast as in the paper ({planned:.2g} s for a step as planned), and answer "
        f"{SIZE} values; the host's links, steps and policies are real, tunnels and training are not there"
    )


class Endless:
    """A ``SampleSupply`` that never comes to an end; all its samples are alike. It is always the middle of
    its epoch.
    """

    epoch, part_left = 1, 0.5

    def deal(self, batches: Sequence[int]) -> list[tuple[Ranges, ...]]:
        """See SampleSupply."""
        return [(((0, batch),),) if batch else () for batch in batches]

    def commit(self, rank: int) -> None:
        """See SampleSupply."""

    def requeue(self, rank: int) -> None:
        """See SampleSupply."""


@dataclass(frozen=True, slots=True)
class Step:
    """The seconds from the end of the one before to its own, and the samples that were counted in it."""

    seconds: float
    samples: int


class Team:
    """``machines`` by rank, under the policy as a job has it; only "balance" does not wait for everyone."""

    def __init__(self, machines: Sequence[Machine], policy: PolicyName, *, tells: bool = False) -> None:
        names = [f"{machine.kind}{rank}" for rank, machine in enumerate(machines)]
        how = (
            SynchronousSpec(policy=policy)
            if policy == "balance"
            else SynchronousSpec(policy=policy, patience=0)
        )
        self._planner = Planner(how, names)
        self._mean = np.empty(SIZE, np.float32)
        self._roster = JobRoster(len(machines), (), 0.0)
        self._engine = ExchangeEngine(self._roster, self._mean, Endless(), lambda: None)
        self._state = _zero_state()
        self._number = 0
        self.workers = [VirtualWorker(name, m, tells=tells) for name, m in zip(names, machines, strict=True)]
        for rank, (worker, machine) in enumerate(zip(self.workers, machines, strict=True)):
            self._roster.join(rank, Dispatcher(rank, worker, self._roster.events))
            self._planner.join(rank, _profile(worker.name, machine), machine.most, _PLENTY)

    @property
    def batches(self) -> list[int]:
        """The batches of the plan by rank."""
        found: list[int] = self._planner.plan.batches.tolist()
        return found

    def run(self, steps: int) -> list[Step]:
        """So many steps. Raises RuntimeError if a sample was not counted, or not as it should be."""
        return [self._step() for _ in range(steps)]

    def close(self) -> None:
        """End all threads, whatever they are at."""
        for dispatcher in self._roster.present.values():
            dispatcher.worker.close()
            dispatcher.end()

    def _step(self) -> Step:
        self._number += 1
        began = time.monotonic()
        outcome = self._engine.run(self._number, 0, self._state, self._planner, self._planner.background)
        if outcome.lost:
            raise RuntimeError(outcome.lost[0].reason)
        if not np.allclose(self._mean, GRADIENT, rtol=1e-4, atol=1e-6):
            raise RuntimeError(f"step {self._number}: the mean is not that of its samples")
        return Step(time.monotonic() - began, outcome.samples)


@contextmanager
def team(machines: Sequence[Machine], policy: PolicyName, *, tells: bool = False) -> Iterator[Team]:
    """One that ends with the context."""
    made = Team(machines, policy, tells=tells)
    try:
        yield made
    finally:
        made.close()


def speed(steps: Sequence[Step]) -> float:
    """Samples per second of this machine's clock."""
    return sum(step.samples for step in steps) / sum(step.seconds for step in steps)


def side_by_side(runs: Mapping[Key, Callable[[], Found]]) -> dict[Key, Found]:
    """All at the same time, so that they meet the same of what else this machine does: sleeping takes next to
    nothing of it. Raises what one of them raised.
    """
    with ThreadPoolExecutor(len(runs)) as pool:
        begun = {key: pool.submit(run) for key, run in runs.items()}
        return {key: future.result() for key, future in begun.items()}


def _profile(name: str, machine: Machine) -> Profile:
    curve = machine.curve
    points = [Point(batch, time, 0) for batch, time in zip(curve.batches, curve.seconds, strict=True)]
    return Profile(name, machine.kind, tuple(points))


def _zero_state() -> ModelState:
    descriptor = memory.make("a state")
    try:
        return ModelState(memory.map_first(descriptor, 4 * SIZE).part(0, 4 * SIZE))
    finally:
        os.close(descriptor)
