# SPDX-License-Identifier: Apache-2.0
"""Edge: ``millpond simulate``: the file of a simulated fleet, and its results under each policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

from rich.table import Table

from millpond.base import toml
from millpond.base.errors import ConfigError
from millpond.base.keys import Key
from millpond.host.cli.simulation.hosts import Hosts, exchange_seconds
from millpond.host.terminal import tables
from millpond.train.balance.controller import PATIENCE, BalanceController, BatchPlan
from millpond.train.balance.curve import Curve, Floats, Ints
from millpond.train.balance.equal_time import Cohort, WorkerKind
from millpond.train.balance.policy import Untuned
from millpond.train.balance.simulation import BatchPolicy, SimulatedLoads, simulate
from millpond.train.balance.stannis import Stannis

MOST_WORKERS = 100_000
POLICIES = ("untuned", "stannis", "millpond")


@dataclass(frozen=True, slots=True)
class Members:
    """``count`` workers: seconds of a step by batch, and the largest batch that their memory takes. Those on
    the ``host`` itself have no link.
    """

    name: str
    count: Annotated[int, Key(least=1)]
    batches: tuple[int, ...]
    seconds: tuple[float, ...]
    most: int = 1 << 20
    host: bool = False


@dataclass(frozen=True, slots=True)
class Simulation:
    """The file of a simulation: workers of a host, their other load, the number of steps and the seed, and
    the hosts, if there are several.
    """

    kind: tuple[Members, ...]
    load: SimulatedLoads = field(default_factory=SimulatedLoads)
    steps: Annotated[int, Key(least=1)] = 1000
    seed: Annotated[int, Key(least=0)] = 1
    patience: Annotated[float, Key(least=1)] = PATIENCE
    hosts: Hosts | None = None

    @property
    def workers(self) -> int:
        """Return the number of workers of a host."""
        return sum(members.count for members in self.kind)

    @property
    def devices(self) -> int:
        """Return the number of those with a link."""
        return sum(members.count for members in self.kind if not members.host)

    @property
    def exchange(self) -> float:
        """Return the seconds of an exchange that follows each step: 0 on one host, as it is in the curves."""
        return exchange_seconds(self.hosts, self.devices) if self.hosts else 0.0


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The result of one policy: ``speed`` in samples per second, its ``share`` of the ideal, ``new_plans``
    made, ``bias`` (the part by which samples of the worst represented worker count too little), the median
    seconds of the controller for a step, and the part of the time that exchanges between hosts take.
    """

    policy: str
    speed: float
    share: float
    new_plans: int
    bias: float
    controller_seconds: float
    communication: float


def read(path: Path) -> Simulation:
    """Read a simulation's file. Raises ConfigError."""
    found = toml.read(Simulation, path)
    if problem := _problem(found):
        raise ConfigError(f"{path.name}: {problem}")
    return found


def _problem(found: Simulation) -> str | None:
    loads = found.load
    if not 0 < found.workers * (found.hosts.count if found.hosts else 1) <= MOST_WORKERS:
        return f"kind: count: 1 to {MOST_WORKERS} workers in all"
    if found.hosts and not found.devices:
        return "kind: host: no worker is left that has a link"
    if not (0 <= loads.busy < 1 and loads.lasting >= 1 and 1 <= loads.least <= loads.most):
        return "load: busy is from 0 to below 1, lasting at least 1, and 1 <= least <= most"
    if min(loads.noise, loads.busy_noise) < 0:
        return "noise and busy_noise are at least 0"
    return None


def cohort_of(simulation: Simulation, where: str) -> Cohort:
    """Return the cohort of a simulation. Raises ConfigError for an impossible curve, or if no worker can
    train.
    """
    kinds: list[WorkerKind] = []
    members: list[int] = []
    for number, found in enumerate(simulation.kind):
        try:
            kinds.append(WorkerKind(Curve(found.batches, found.seconds), found.most))
        except ValueError as error:
            raise ConfigError(f"{where}: kind: {found.name}: {error}") from None
        members += found.count * [number]
    cohort = Cohort(kinds, members * (simulation.hosts.count if simulation.hosts else 1))
    if not cohort.caps.any():
        raise ConfigError(f"{where}: kind: most: nobody has memory for a batch of 2")
    return cohort


def run(simulation: Simulation, cohort: Cohort, names: Iterable[str] = POLICIES) -> list[PolicyResult]:
    """Simulate the same loads under each of the named policies."""
    policies: dict[str, Callable[[], BatchPolicy]] = {
        "untuned": lambda: Untuned(cohort),
        "stannis": lambda: Stannis(cohort),
        "millpond": lambda: BalanceController(cohort, patience=simulation.patience),
    }
    return [_run_one(simulation, cohort, name, policies[name]()) for name in names]


def _run_one(simulation: Simulation, cohort: Cohort, name: str, policy: BatchPolicy) -> PolicyResult:
    timed = _Timed(policy)
    load, exchange = simulation.load, simulation.exchange
    outcome = simulate(cohort, timed, load, simulation.steps, simulation.seed, exchange)
    return PolicyResult(
        name,
        outcome.speed,
        outcome.share,
        outcome.new_plans,
        outcome.bias,
        median(timed.seconds),
        outcome.communication,
    )


class _Timed:
    """A policy that measures its own time."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self.seconds: list[float] = []  # by step

    @property
    def plan(self) -> BatchPlan:
        """The present plan. Each step of the simulation begins with reading it."""
        self.seconds.append(0.0)
        return self._policy.plan

    def observe(
        self, batches: Ints, measured: Floats, busy: Floats | None = None, left: float = 1.0, /
    ) -> bool:
        """Pass the times to the policy, and measure its time."""
        began = time.perf_counter()
        changed = self._policy.observe(batches, measured, busy, left)
        self.seconds[-1] += time.perf_counter() - began
        return changed


def show(results: list[PolicyResult]) -> Table:
    """Return the results as a table."""
    heading = [
        "policy",
        "samples/s",
        "of the ideal",
        "new plans",
        "worst counted less",
        "controller",
        "exchange",
    ]
    table = tables.figures(*heading)
    for row in results:
        numbers = (
            f"{row.speed:.1f}",
            f"{100 * row.share:.1f}%",
            str(row.new_plans),
            f"{100 * row.bias:.2f}%",
        )
        spent = f"{1e3 * row.controller_seconds:.2f} ms", f"{100 * row.communication:.1f}%"
        table.add_row(row.policy, *numbers, *spent)
    return table
