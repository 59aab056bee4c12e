# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): synchronous steps: sends tasks to all workers, sums their gradients up to the deadline.

A late worker goes on, and its gradients count in the step in which they come: at a state that is a step old,
but no samples are left out. It then takes the batch that fits into the rest of that step.
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

_TICK = 0.2  # seconds after which a waiting step calls on_wait
_PATIENCE = 10.0  # times the planned time, after which a worker is lost
_SAFE = 0.9  # of what the rule of three gives for the rest of a step: a batch has a fixed cost, too


class SampleSupply(Protocol):
    """The source of the samples of tasks."""

    def deal(self, batches: Sequence[int]) -> list[Samples]:
        """Return samples for these batches, by rank; empty where there are none."""

    def commit(self, rank: int) -> None:
        """Mark the worker's samples as part of a step."""

    def requeue(self, rank: int) -> None:
        """Take back the samples of a worker that was lost."""


@dataclass(slots=True)
class StepOutcome:
    """The outcome of a step: ``counted`` samples by rank, their summed ``loss``, the workers ``lost``.
    ``late`` of the samples began in an earlier step. ``whole`` is how many samples began in the same step as
    the counted ones (the largest such step if some are late); ``work`` is the longest computation in seconds
    of a worker in this step.
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
        """The number of samples that went into the step."""
        return sum(self.counted.values())


class StepEngine:
    """Runs steps of up to ``workers`` workers and leaves the average of their gradients in ``mean``, float32
    [size]. ``dispatchers`` are those of the present workers by rank; ``profiler`` has the workers that do not
    take part yet. ``on_wait`` is called repeatedly while a step waits; an exception from it ends the step.
    """

    def __init__(self, workers: int, mean: Vector, supply: SampleSupply, on_wait: Callable[[], None]) -> None:
        self.events: queue.SimpleQueue[WorkerAnswer | WorkerLoss] = queue.SimpleQueue()
        self.dispatchers: dict[int, Dispatcher] = {}
        self.busy: Floats = np.full(workers, np.nan)  # share of each worker's processor that other work takes
        self.supply, self._on_wait = supply, on_wait
        self.profiler: Profiler | None = None
        self._total = OrderedSum(mean)
        self._batches: Ints = np.zeros(workers, np.int64)
        self._measured: Floats = np.full(workers, np.nan)
        self._begun: dict[int, int] = {}  # samples, by step

    def step(
        self, number: int, seed: int, state: ModelState, policy: BatchPolicy, background: Ints
    ) -> StepOutcome:
        """Run one step from ``state``. ``background`` are batches for workers too slow to have one in the
        plan: a step with a deadline waits for them only if no other worker has a task. An outcome without
        samples and losses means that no present worker can read the samples that are left.
        """
        run = _Step(number, seed, state, policy, time.monotonic())
        self._measured[:] = math.nan
        self._begin(run, self._idle(), run.plan.batches)
        self._begin(run, self._idle(), background)
        self._total.begin()
        for dispatcher in self.outstanding():
            self._total.announce((dispatcher.rank, False))
        while self._awaited(run) and (event := self._next_event(run)):
            if self.dispatchers.get(event.dispatcher.rank) is event.dispatcher:
                self._handle(run, event)
        steps = {dispatcher.task.request.step for dispatcher in self.outstanding() if dispatcher.task}
        self._begun = {step: begun for step, begun in self._begun.items() if step in steps}
        run.outcome.seconds = time.monotonic() - run.began
        run.outcome.new_plan |= policy.observe(self._batches, self._measured, self.busy)
        return run.outcome

    def average(self) -> None:
        """Turn the sums in ``mean`` into the average of the last step. The next step overwrites it."""
        self._total.divide()

    def _awaited(self, run: _Step) -> list[Dispatcher]:
        """Return the dispatchers that the step waits for."""
        outstanding = self.outstanding()
        if run.plan.deadline == math.inf:
            return outstanding
        return [dispatcher for dispatcher in outstanding if run.plan.batches[dispatcher.rank]] or (
            [] if run.outcome.counted else outstanding
        )

    def outstanding(self) -> list[Dispatcher]:
        """Return the dispatchers whose workers owe an answer, by rank."""
        return [dispatcher for _, dispatcher in sorted(self.dispatchers.items()) if dispatcher.task]

    def tasks(self) -> list[GradientTask]:
        """Return the tasks under way, those of the profiler too."""
        measured = self.profiler.dispatchers if self.profiler else ()
        return [dispatcher.task for dispatcher in (*self.dispatchers.values(), *measured) if dispatcher.task]

    @property
    def states_in_use(self) -> set[ModelState]:
        """The states that tasks under way compute at."""
        return {task.state for task in self.tasks()}

    def _idle(self) -> list[int]:
        return [rank for rank, dispatcher in sorted(self.dispatchers.items()) if not dispatcher.task]

    def _begin(self, run: _Step, ranks: Sequence[int], batches: Ints) -> None:
        """Give a task to each of ``ranks`` that has a batch and samples for it."""
        wanted = np.zeros_like(batches)
        wanted[ranks] = batches[ranks]
        dealt = self.supply.deal(wanted.tolist()) if wanted.any() else []
        for rank in ranks if dealt else ():
            if any(dealt[rank]):
                seed = seeds.derive(run.seed, str(rank), run.number)
                task = GradientTask(Compute(run.number, seed, dealt[rank]), run.state)
                self.dispatchers[rank].begin(
                    task, max(LONGEST_SECONDS, _PATIENCE * float(run.plan.times.max()))
                )
                self._begun[run.number] = self._begun.get(run.number, 0) + task.samples

    def _next_event(self, run: _Step) -> WorkerAnswer | WorkerLoss | None:
        """Return the next answer or loss; None at the deadline, if the step has counted samples."""
        while True:
            self._on_wait()
            left = run.began + run.plan.deadline - time.monotonic()
            if left <= 0 and run.outcome.counted:
                return None
            try:
                event = self.events.get(timeout=min(left, _TICK) if left > 0 else _TICK)
            except queue.Empty:
                continue
            if self.profiler is None or event.dispatcher not in self.profiler:
                return event
            self.profiler.handle(event)

    def _handle(self, run: _Step, event: WorkerAnswer | WorkerLoss) -> None:
        rank, samples = event.dispatcher.rank, event.task.samples
        if isinstance(event, WorkerLoss):
            self.lose(event)
            run.outcome.lost.append(event)
            return
        event.dispatcher.task = None
        self.supply.commit(rank)
        again, late = rank in run.outcome.counted, event.task.request.step != run.number
        # A late worker may begin its next task before the turn of its sums has come.
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
        """Report a late answer to the policy at once: the same worker may answer again in this step."""
        batches = np.zeros_like(self._batches)
        measured, busy = np.full_like(self._measured, np.nan), np.full_like(self.busy, np.nan)
        batches[rank], measured[rank], busy[rank] = samples, seconds, self.busy[rank]
        return policy.observe(batches, measured, busy)

    def _begin_rest(self, run: _Step, rank: int) -> None:
        """Give a worker that was late the part of its batch for which the step has time."""
        planned = float(run.plan.times.max())
        left = 1 - (time.monotonic() - run.began) / planned if planned else 0.0
        batches = np.zeros_like(run.plan.batches)
        batches[rank] = int(_SAFE * left * run.plan.batches[rank])
        if batches[rank] >= LEAST_BATCH:
            self._begin(run, [rank], batches)
            if self.dispatchers[rank].task:
                self._total.announce((rank, True))

    def lose(self, loss: WorkerLoss) -> None:
        """Drop a lost worker's dispatcher and requeue its samples."""
        del self.dispatchers[loss.dispatcher.rank]
        self.supply.requeue(loss.dispatcher.rank)


class _Step:
    """The state of one step."""

    def __init__(self, number: int, seed: int, state: ModelState, policy: BatchPolicy, began: float) -> None:
        self.number, self.seed, self.state, self.began = number, seed, state, began
        self.policy, self.plan = policy, policy.plan
        self.outcome = StepOutcome()
