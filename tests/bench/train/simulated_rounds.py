# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): measures what the host's decisions about a round take, with simulated clients."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.experiment import Run
from bench.rows import Row, summary
from millpond.host.jobs.training.collection import Collection
from millpond.host.jobs.training.membership import Membership, MemberState
from millpond.host.jobs.training.round_planner import RoundPlanner
from millpond.train.balance.curve import Ints

CLIENTS = 10_000
LOST, LATE = 0.1, 0.1
QUORUM, DEADLINE, SAMPLES = 0.5, 60.0, 100
TITLE = "Decisions of a round with simulated clients"
_ROUNDS = 12
_EMULATION = (
    "clients and their clock are data: no model, no connection, no engine; only who is asked, whose answer "
    "counts, when the round is over, who is banned and who comes back"
)


@dataclass(frozen=True, slots=True)
class Faults:
    """What happens in one round: ``answers`` and ``losses`` come in the order of ``events``; all others are
    late, and come at the beginning of the next round.
    """

    events: tuple[int, ...]
    lost: frozenset[int]


class SimulatedRounds:
    """The decisions of the engine and the trainer, in their order."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._collection = Collection(late_counts=False)
        self._membership = Membership[int](clients, range(clients), QUORUM)
        self._planner = RoundPlanner([f"csd{rank}" for rank in range(clients)], DEADLINE)
        self._owed: list[int] = []  # answers of the last round, which are late
        self._now = 0.0

    def run(self, faults: Faults) -> int:
        """Decide on a round. Returns how many answers count. Raises RuntimeError without a quorum."""
        self._admit()
        plan = self._planner.plan
        self._collection.begin(self._now + plan.deadline)
        asked = np.flatnonzero(plan.batches).tolist()
        for rank in asked:
            self._collection.plan(rank)
        late = set(self._owed)
        for rank in asked:
            if rank not in late:
                self._collection.ask(rank)
        counted = self._collect(faults, set(asked))
        self._now += plan.deadline
        if not self._collection.is_over(self._now) or not self._membership.is_quorum(counted):
            raise RuntimeError(f"{len(counted)} of {self._clients} answers are no round")
        self._owed = self._collection.end()
        self._membership.counted(counted)
        return len(counted)

    def _admit(self) -> None:
        """Have those come back that may."""
        for rank in range(self._clients):
            if self._membership.state(rank, self._now) is MemberState.ABSENT:
                self._membership.join(rank, rank)
                self._planner.join(rank, SAMPLES)

    def _collect(self, faults: Faults, asked: set[int]) -> list[int]:
        """Returns the ranks whose answers count."""
        for rank in self._owed:
            if not self._collection.is_over(self._now) and not self._collection.answered(rank):
                self._collection.ask(rank)
        counted = []
        for rank in faults.events:
            if rank not in asked or self._collection.is_over(self._now):
                continue
            if rank in faults.lost:
                self._collection.lost(rank)
                self._membership.lose(rank, self._now, for_good=False)
                self._planner.leave(rank)
            elif self._collection.answered(rank):
                counted.append(rank)
        return counted


def faults(clients: int, source: np.random.Generator) -> Faults:
    """Those of one round: some are lost, some late, all in any order."""
    order: Ints = source.permutation(clients)
    lost, late = round(LOST * clients), round(LATE * clients)
    events: Ints = source.permutation(order[: clients - late])
    return Faults(tuple(events.tolist()), frozenset(order[:lost].tolist()))


def measure(run: Run) -> list[Row]:
    """Row ``sim_rounds_10000``."""
    found, counted = [], []
    for repeat in range(run.repeats):
        source, simulated = np.random.default_rng(repeat), SimulatedRounds(CLIENTS)
        seconds = []
        for _ in range(4 if run.quick else _ROUNDS):
            ahead = faults(CLIENTS, source)
            began = time.perf_counter()
            counted.append(simulated.run(ahead))
            seconds.append(time.perf_counter() - began)
        found.append(1000 * median(seconds))
        run.say(f"{CLIENTS} clients: {found[-1]:.1f} ms of decisions per round")
    what = (
        f"{CLIENTS} clients, of which {LOST:.0%} are lost and {LATE:.0%} late in each round ("
        f"{min(counted)} to {max(counted)} answers count): round plan, collection of answers and "
        "membership; median round"
    )
    return [summary("sim_rounds_10000", what, found, "ms", emulation=_EMULATION)]
