"""Edge (the clock): synchronous steps: tasks to all workers, their sums as they come, no longer than planned.

Whoever is late goes on, and its sums count in the step in which they come: at a state that is a step old, but
nobody's samples are left out. It then begins again with what it can do in the rest of that step.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from millpond.host.jobs.synchronous.profiler import Profiler
from millpond.host.workers.dispatcher import (
    LONGEST_SECONDS,
    Dispatcher,
    GradientTask,
    Samples,
    WorkerAnswer,
    WorkerLoss,
)
from millpond.host.workers.worker import ModelState
from millpond.train.balance.curve import Floats, Ints
from millpond.train.balance.equal_time import LEAST_BATCH
from millpond.train.balance.simulation import BatchPolicy
from millpond.train.determinism import seeds
from millpond.train.protocol import Compute
from millpond.train.reduce.exact import Vector
from millpond.train.reduce.ordered import OrderedSum

_TICK = 0.2  # seconds after which a waiting step looks around
_PATIENCE = 10.0  # times the planned time, after which a worker is lost
_SAFE = 0.9  # of what the rule of three gives for the rest of a step: a batch has a fixed cost, too


class SampleSupply(Protocol):
    """Where the samples of tasks come from."""

    def deal(self, batches: Sequence[int]) -> list[Samples]:
        """Samples for these batches, by rank; empty where there are none."""

    def counted(self, rank: int) -> None:
        """Those of the worker became part of a step."""

    def give_back(self, rank: int) -> None:
        """They did not."""


@dataclass(slots=True)
class StepOutcome:
    """Of a step: the samples that were counted, by rank, their ``loss`` as a sum, and who was lost in it.
    ``late`` of the samples began in an earlier step. ``whole`` is how many samples began in a step with them,
    in the largest where some are late; ``work`` are the longest seconds of a worker for what began in it.
    """

    seconds: float = 0.0
    work: float = 0.0
    whole: int = 0
    late: int = 0
    counted: dict[int, int] = field(default_factory=dict)
    loss: float = 0.0
    lost: list[WorkerLoss] = field(default_factory=list)
    new_plan: bool = False

    @property
    def samples(self) -> int:
        """All that were counted."""
        return sum(self.counted.values())


class StepEngine:
    """Steps of up to ``workers`` workers whose sums become a ``mean``. ``links`` are those there are now,
    by rank, and ``measuring`` those that do not take part yet. ``look_around`` is called now and then while a
    step waits; what it raises ends the step.
    """

    def __init__(
        self, workers: int, mean: Vector, supply: SampleSupply, look_around: Callable[[], None]
    ) -> None:
        self.events: queue.SimpleQueue[WorkerAnswer | WorkerLoss] = queue.SimpleQueue()
        self.links: dict[int, Dispatcher] = {}
        self.busy: Floats = np.full(workers, np.nan)  # part of each one's processor that other work takes
        self.supply, self._look_around = supply, look_around
        self.measuring: Profiler | None = None
        self._total = OrderedSum(mean)
        self._batches: Ints = np.zeros(workers, np.int64)
        self._measured: Floats = np.full(workers, np.nan)
        self._begun: dict[int, int] = {}  # samples, by step

    def step(self, number: int, seed: int, state: ModelState, policy: BatchPolicy, rest: Ints) -> StepOutcome:
        """One step from ``state``. ``rest`` are batches for those who are too slow to have one in the plan:
        they work on these meanwhile, and only when nobody else does, they are waited for. Without samples in
        its outcome, nobody can read what is left.
        """
        run = _Run(number, seed, state, policy, time.monotonic())
        self._measured[:] = math.nan
        self._begin(run, self._idle(), run.plan.batches)
        self._begin(run, self._idle(), rest)
        self._total.begin()
        for link in self.at_work():
            self._total.announce((link.rank, False))
        while self._awaited(run) and (event := self._next(run)):
            if self.links.get(event.link.rank) is event.link:
                self._take(run, event)
        steps = {link.task.request.step for link in self.at_work() if link.task}
        self._begun = {step: begun for step, begun in self._begun.items() if step in steps}
        run.outcome.seconds = time.monotonic() - run.began
        run.outcome.new_plan |= policy.observe(self._batches, self._measured, self.busy)
        return run.outcome

    def average(self) -> None:
        """``mean`` becomes the last step's. It may change again when the next step has begun."""
        self._total.divide()

    def _awaited(self, run: _Run) -> list[Dispatcher]:
        """Those whom the step waits for."""
        at_work = self.at_work()
        if run.plan.deadline == math.inf:
            return at_work
        return [link for link in at_work if run.plan.batches[link.rank]] or (
            [] if run.outcome.counted else at_work
        )

    def at_work(self) -> list[Dispatcher]:
        """Those that owe an answer, by rank."""
        return [link for _, link in sorted(self.links.items()) if link.task]

    def tasks(self) -> list[GradientTask]:
        """Those that somebody is at, or is measured with."""
        measured = self.measuring.links if self.measuring else ()
        return [link.task for link in (*self.links.values(), *measured) if link.task]

    @property
    def held(self) -> set[ModelState]:
        """The states that they are at."""
        return {task.state for task in self.tasks()}

    def _idle(self) -> list[int]:
        return [rank for rank, link in sorted(self.links.items()) if not link.task]

    def _begin(self, run: _Run, ranks: Sequence[int], batches: Ints) -> None:
        """Give those of ``ranks`` that have a batch and samples for it something to do."""
        wanted = np.zeros_like(batches)
        wanted[ranks] = batches[ranks]
        dealt = self.supply.deal(wanted.tolist()) if wanted.any() else []
        for rank in ranks if dealt else ():
            if any(dealt[rank]):
                seed = seeds.derive(run.seed, str(rank), run.number)
                task = GradientTask(Compute(run.number, seed, dealt[rank]), run.state)
                self.links[rank].begin(task, max(LONGEST_SECONDS, _PATIENCE * float(run.plan.times.max())))
                self._begun[run.number] = self._begun.get(run.number, 0) + task.samples

    def _next(self, run: _Run) -> WorkerAnswer | WorkerLoss | None:
        """What happens next; None when the step has lasted long enough, and something was counted in it."""
        while True:
            self._look_around()
            left = run.began + run.plan.deadline - time.monotonic()
            if left <= 0 and run.outcome.counted:
                return None
            try:
                event = self.events.get(timeout=min(left, _TICK) if left > 0 else _TICK)
            except queue.Empty:
                continue
            if self.measuring is None or event.link not in self.measuring:
                return event
            self.measuring.take(event)

    def _take(self, run: _Run, event: WorkerAnswer | WorkerLoss) -> None:
        rank, samples = event.link.rank, event.task.samples
        if isinstance(event, WorkerLoss):
            self.lose(event)
            run.outcome.lost.append(event)
            return
        event.link.task = None
        self.supply.counted(rank)
        again, late = rank in run.outcome.counted, event.task.request.step != run.number
        # Whoever is late may begin something else before its sums' turn has come.
        self._total.add((rank, again), event.sums.copy() if late else event.sums, samples)
        run.outcome.counted[rank] = run.outcome.counted.get(rank, 0) + samples
        run.outcome.whole = max(run.outcome.whole, self._begun[event.task.request.step])
        run.outcome.loss += event.computed.loss
        self.busy[rank] = event.computed.busy
        if not late:
            self._batches[rank], self._measured[rank] = samples, event.seconds
            run.outcome.work = max(run.outcome.work, event.computed.seconds)
        else:
            run.outcome.late += samples
            run.outcome.new_plan |= self._observe_alone(run.policy, rank, samples, event.seconds)
            self._begin_rest(run, rank)

    def _observe_alone(self, policy: BatchPolicy, rank: int, samples: int, seconds: float) -> bool:
        """A late answer, at once: another of the same worker may come in the same step."""
        batches = np.zeros_like(self._batches)
        measured, busy = np.full_like(self._measured, np.nan), np.full_like(self.busy, np.nan)
        batches[rank], measured[rank], busy[rank] = samples, seconds, self.busy[rank]
        return policy.observe(batches, measured, busy)

    def _begin_rest(self, run: _Run, rank: int) -> None:
        """A worker that was late has time for a part of its batch."""
        planned = float(run.plan.times.max())
        left = 1 - (time.monotonic() - run.began) / planned if planned else 0.0
        batches = np.zeros_like(run.plan.batches)
        batches[rank] = int(_SAFE * left * run.plan.batches[rank])
        if batches[rank] >= LEAST_BATCH:
            self._begin(run, [rank], batches)
            if self.links[rank].task:
                self._total.announce((rank, True))

    def lose(self, loss: WorkerLoss) -> None:
        """Drop a link; its samples go back."""
        del self.links[loss.link.rank]
        self.supply.give_back(loss.link.rank)


class _Run:
    """What belongs to one step."""

    def __init__(self, number: int, seed: int, state: ModelState, policy: BatchPolicy, began: float) -> None:
        self.number, self.seed, self.state, self.began = number, seed, state, began
        self.policy, self.plan = policy, policy.plan
        self.outcome = StepOutcome()
