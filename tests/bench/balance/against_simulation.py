# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): the simulator against virtual workers that have the same loads in the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from bench.balance.paper import CSD, CURVES, HOST, Machine
from bench.balance.team import emulation, side_by_side, speed, team
from bench.experiment import Experiment, Run
from bench.rows import Row, summary
from millpond.train.balance.controller import PATIENCE, BalanceController
from millpond.train.balance.curve import Floats
from millpond.train.balance.equal_time import Cohort, WorkerKind
from millpond.train.balance.simulation import SimulatedLoads, simulate

TEAMS = {3: 3 * (HOST,), 8: (HOST, *7 * (CSD,))}
_LOADS = SimulatedLoads(busy=0.2, lasting=10.0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Repeats, each with other loads; steps; seconds of one as planned."""

    repeats: int
    steps: int
    planned: float

    @property
    def factor(self) -> float:
        """Of time."""
        return self.planned / HOST.curve.seconds[-1]


FULL, QUICK = Lengths(3, 30, 1.0), Lengths(1, 3, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(SimulatedLoads):
    """How slow each worker is in each step; nothing else varies."""

    slowness: Iterator[Floats]

    def begin(self, size: int, source: np.random.Generator) -> Floats:
        """See Loads."""
        return next(self.slowness)

    def change(self, slowness: Floats, source: np.random.Generator) -> Floats:
        """See Loads."""
        return next(self.slowness, slowness)


Key = tuple[int, int]
"""How many workers, and which loads."""


def measure(run: Run) -> list[Row]:
    """Row ``sim_error``, and one for each number of workers."""
    lengths = QUICK if run.quick else FULL
    run.say(f"simulator: {lengths.steps} steps of virtual workers, {lengths.repeats} loads at the same time")
    keys = [(workers, seed) for workers in TEAMS for seed in range(1, lengths.repeats + 1)]
    virtual = side_by_side({key: partial(_virtual, key, lengths) for key in keys})
    pairs = {
        workers: [(virtual[key], _simulated(key, lengths)) for key in keys if key[0] == workers]
        for workers in TEAMS
    }
    worst = max(pairs, key=lambda workers: median(_errors(pairs[workers])))
    rows = [_row("sim_error", worst, pairs[worst], lengths)]
    rows += [_row(f"sim_error.{workers}", workers, found, lengths) for workers, found in pairs.items()]
    return rows


EXPERIMENT = Experiment("sim_error", "The simulator against virtual workers with the same loads", measure)


def _machines(workers: int, lengths: Lengths) -> list[Machine]:
    return [machine.scaled(lengths.factor) for machine in TEAMS[workers]]


def _slowness(key: Key, lengths: Lengths) -> list[Floats]:
    """By step."""
    source = np.random.default_rng(key)
    found = [_LOADS.begin(key[0], source)]
    while len(found) < lengths.steps:
        found.append(_LOADS.change(found[-1], source))
    return found


def _virtual(key: Key, lengths: Lengths) -> float:
    """Samples per second."""
    steps = []
    with team(_machines(key[0], lengths), "balance", tells=True) as made:
        for slowness in _slowness(key, lengths):
            for worker, slow in zip(made.workers, slowness.tolist(), strict=True):
                worker.slowness = slow
            steps += made.run(1)
    return speed(steps)


def _simulated(key: Key, lengths: Lengths) -> float:
    machines = _machines(key[0], lengths)
    kinds = list(dict.fromkeys(machines))
    crew = Cohort(
        [WorkerKind(machine.curve, machine.most) for machine in kinds], [kinds.index(m) for m in machines]
    )
    loads = Schedule(noise=0.0, busy_noise=0.0, slowness=iter(_slowness(key, lengths)))
    return simulate(crew, BalanceController(crew, patience=PATIENCE), loads, lengths.steps, 0).speed


def _errors(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [abs(simulated - virtual) / virtual for virtual, simulated in pairs]


def _row(figure: str, workers: int, pairs: Sequence[tuple[float, float]], lengths: Lengths) -> Row:
    factor = lengths.factor
    speeds = ", ".join(f"{factor * simulated:.1f} / {factor * virtual:.1f}" for virtual, simulated in pairs)
    what = f"{workers} workers, {lengths.steps} steps: samples/s of simulator / virtual workers: {speeds}"
    note = (
        f"{emulation(factor, lengths.planned)}; {_LOADS.busy:.0%} are busy, for {_LOADS.lasting:g} steps on "
        f"average and then {_LOADS.least:g} to {_LOADS.most:g} times as slow, and tell of it; repeats have "
        f"other loads; {CURVES}"
    )
    return summary(figure, what, _errors(pairs), "x", peer="virtual workers", emulation=note)
