# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): exchanges: sends tasks to all workers, waits for their updates, and averages these.

Where late updates count, a late worker goes on, and its update is part of the exchange in which it comes:
from a state that is older, but no samples are left out. Where they do not, it is dropped when it comes.
Where there is a buffer, updates go into it as they come, and their workers go on from the newest state.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from millpond.aggregate.kernels import Vector
from millpond.aggregate.masking.exchange import CohortFailed
from millpond.aggregate.masking.messages import SumBits
from millpond.aggregate.rules.mean import MEAN
from millpond.aggregate.rules.rule import CombinationRule
from millpond.host.jobs.context import JobFailed
from millpond.host.jobs.training.collection import ALL_COUNT, Collection, LatePolicy
from millpond.host.jobs.training.reduction import NoisyBound, UpdateBuffer, UpdateReduction
from millpond.host.jobs.training.roster import JobRoster
from millpond.host.records.data_costs import DataCosts
from millpond.host.workers.dispatcher import (
    LONGEST_SECONDS,
    Assignment,
    Dispatcher,
    WorkerAnswer,
    WorkerLoss,
)
from millpond.host.workers.masked_reduction import MaskedReduction
from millpond.host.workers.node_reduction import NodeReduction
from millpond.host.workers.worker import DeviceWorker, ModelState
from millpond.train.balance.curve import Floats, Ints
from millpond.train.balance.ranges import Ranges
from millpond.train.balance.simulation import BatchPolicy
from millpond.train.determinism import seeds
from millpond.train.protocol import Work
from millpond.train.task.sums import LOSS, Sums, add

LONGEST_SCORE_SECONDS = 86_400.0
"""Time limit of a score on held-out samples; a worker that hangs is noticed sooner, by its agent."""
SCORE_SECONDS = 21_600.0
"""Time after which a score waits no more for workers that take _PATIENCE times as long as the others."""
_TICK = 0.2  # seconds after which a waiting exchange calls on_wait
_PATIENCE = 10.0  # times the planned time, after which a worker is lost
_MOST_SUMLESS = 10  # exchanges without a sum of masked updates, one after the other
_ROUNDS = 3.0  # times the deadline of an exchange without planned times, after which a worker is lost


class SampleSupply(Protocol):
    """The source of the samples of tasks."""

    @property
    def epoch(self) -> int:
        """The epoch in whose order the samples are dealt."""

    @property
    def part_left(self) -> float:
        """The part of the epoch's samples that no worker has taken, 0 to 1."""

    def deal(self, batches: Sequence[int]) -> list[tuple[Ranges, ...]]:
        """Return samples for these batches, by rank and folder; empty where there are none."""

    def commit(self, rank: int) -> None:
        """Mark the worker's samples as part of the model."""

    def requeue(self, rank: int) -> None:
        """Take back the samples of a worker that was lost."""


Coming = Callable[[Sequence[int]], Sequence[Sequence[tuple[Ranges, ...]]]]
"""Returns what would be dealt in the exchanges after this one, if all of them have these batches."""


@dataclass(slots=True)
class ExchangeOutcome:
    """The outcome of an exchange: ``counted`` samples by rank, the summed ``loss`` and its ``count``, the
    workers ``lost`` and ``missing`` (asked, but without an answer in time). ``late`` of the samples began in
    an earlier exchange. ``whole`` is how many samples began in the same exchange as the counted ones (the
    largest such exchange if some are late). ``local_steps`` is the mean by samples of those by which
    differences were divided; ``work`` is the longest computation in seconds of a worker in this exchange.
    ``deadline`` is that of its plan. ``ages`` has for each update how many exchanges its state was old,
    ``data`` by rank what the data of the counted samples cost. ``failed`` is why masked updates have no sum.
    """

    seconds: float = 0.0
    work: float = 0.0
    whole: int = 0
    late: int = 0
    counted: dict[int, int] = field(default_factory=dict)
    loss: float = 0.0
    count: float = 0.0
    lost: list[WorkerLoss] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    new_plan: bool = False
    deadline: float = math.inf
    local_steps: float = 1.0
    ages: list[int] = field(default_factory=list)
    data: dict[int, DataCosts] = field(default_factory=dict)
    unused: frozenset[int] = frozenset()
    failed: str = ""

    @property
    def samples(self) -> int:
        """The number of samples that went into the exchange."""
        return sum(self.counted.values())


class ExchangeEngine:
    """Runs exchanges of the workers of a ``roster`` and leaves the mean of their updates in ``mean``, float32
    [size], the first ``parameters`` values of parameters, the others of buffers. ``on_wait`` is called
    repeatedly while an exchange waits; an exception from it ends the exchange.
    """

    def __init__(
        self,
        roster: JobRoster,
        mean: Vector,
        supply: SampleSupply,
        on_wait: Callable[[], None],
        *,
        late: LatePolicy = ALL_COUNT,
        clip: float | None = None,
        bits: SumBits = 64,
        largest: NoisyBound | None = None,
        rule: CombinationRule = MEAN,
        nodes: NodeReduction | None = None,
        coming: Coming | None = None,
        parameters: int | None = None,
        masked: MaskedReduction | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roster, self._coming, self._clock = roster, coming, clock
        self.busy: Floats = np.full(
            roster.size, np.nan
        )  # share of each worker's processor that other work takes
        self.supply, self._on_wait = supply, on_wait
        self._reduction, self._nodes = (
            UpdateReduction(mean, clip, rule, nodes, late, parameters, bits, largest),
            nodes,
        )
        self._late, self._masked = late, masked
        self._buffer = UpdateBuffer(mean, self._reduction, late.buffer) if late.buffer else None
        self._collection = Collection(late_counts=late.counts, buffer=late.buffer)
        self._batches: Ints = np.zeros(roster.size, np.int64)
        self._measured: Floats = np.full(roster.size, np.nan)
        self._begun: dict[int, int] = {}  # samples, by exchange
        self._scoring: set[int] = set()  # ranks that owe a score
        self._sumless = 0  # exchanges without a sum of masked updates, one after the other

    def run(
        self,
        number: int,
        seed: int,
        state: ModelState,
        policy: BatchPolicy,
        background: Ints,
        enough: Callable[[Sequence[int]], bool] = bool,
        *,
        recorded: int | None = None,
        records: bool = True,
    ) -> ExchangeOutcome:
        """Run one exchange from ``state``. Updates are only fetched if the ranks that have answered are
        ``enough``; else their samples are requeued. ``background`` are batches for workers too slow to have
        one in the plan: an exchange with a deadline waits for them only if no other worker has a task. An
        outcome without samples and losses means that no present worker can read the samples that are left.
        Workers are told whether the host ``records`` the exchange, and which it has ``recorded`` before.
        """
        run = _Run(number, seed, state, policy, self._clock())
        run.recorded, run.records = recorded, records
        self._reduction.begin(number, state.values)
        self._measured[:] = math.nan
        self._collection.begin(run.began + run.plan.deadline)
        if self._buffer:
            self._buffer.begin(int(run.plan.batches.max()))
        for rank in np.flatnonzero(run.plan.batches).tolist():
            self._collection.plan(rank)
        run.spread = frozenset(rank for rank in self._idle() if run.plan.batches[rank])
        self._spread(state, sorted(run.spread))
        self._begin(run, self._idle(), run.plan.batches)
        run.spread = frozenset()
        self._begin(run, self._idle(), background)
        while event := self._next_event(run):
            if self._roster.present.get(event.dispatcher.rank) is event.dispatcher:
                self._handle(run, event)
        full = len(run.answers) >= self._late.buffer
        if full and enough([answer.dispatcher.rank for answer in run.answers]):
            self._reduce(run)
        else:
            for answer in run.answers:
                self.supply.requeue(answer.dispatcher.rank)
        self._end(run)
        self._check_sum(run.outcome.failed)
        run.outcome.deadline = run.plan.deadline
        run.outcome.seconds = self._clock() - run.began
        run.outcome.new_plan |= policy.observe(
            self._batches, self._measured, self.busy, self.supply.part_left
        )
        return run.outcome

    def _check_sum(self, failed: str) -> None:
        """Raise JobFailed if sums of masked updates cannot be had."""
        self._sumless = self._sumless + 1 if failed else 0
        if self._sumless == _MOST_SUMLESS:
            raise JobFailed(f"no sum of masked updates in {_MOST_SUMLESS} tries: {failed}")

    def score(self, number: int, state: ModelState) -> tuple[Sums, list[int], list[WorkerLoss]]:
        """Have all idle workers score ``state`` on the samples that they hold out. Returns the sums and
        counts of all of them, the ranks of those that have scored, and the workers that were lost.
        """
        self._scoring, sums, scored, lost = set(self._idle()), Sums(), list[int](), list[WorkerLoss]()
        began, patience = self._clock(), math.inf
        self._spread(state, sorted(self._scoring))
        for rank in sorted(self._scoring):
            task = Assignment(Work(number, 0, self.supply.epoch, (), held_out=True), state)
            self._roster.present[rank].begin(task, LONGEST_SCORE_SECONDS)
        while self._scoring:
            self._on_wait()
            if self._clock() - began > patience:
                self._abandon_scores(patience)
            if not (event := self._roster.wait(_TICK)):
                continue
            rank = event.dispatcher.rank
            if rank not in self._scoring or not event.task.request.held_out:
                self._roster.keep(event)
                continue
            self._scoring.discard(rank)
            event.dispatcher.task = None
            if isinstance(event, WorkerAnswer):
                add(sums, event.update.metrics)
                scored.append(rank)
                patience = max(SCORE_SECONDS, _PATIENCE * event.seconds)
            else:
                self._roster.leave(rank)
                lost.append(event)
        return sums, scored, lost

    def _abandon_scores(self, seconds: float) -> None:
        for rank in self._scoring:
            self._roster.present[rank].abandon(f"no score within {seconds:.3g} s, unlike others")

    def done(self, number: int) -> float:
        """Return the part of the samples of an exchange that are computed, 0 to 1, by the workers' word."""
        left = sum(
            each.task.samples * (100 - each.worker.percent)
            for each in self._roster.present.values()
            if each.task and each.task.request.exchange == number and not each.task.request.held_out
        )
        begun = self._begun.get(number, 0)
        return 1 - left / (100 * begun) if left < 100 * begun else 0.0

    def outstanding(self) -> list[Dispatcher]:
        """Return the dispatchers whose workers owe an answer that counts, by rank."""
        return [self._roster.present[rank] for rank in sorted({*self._collection.owing, *self._scoring})]

    def _idle(self) -> list[int]:
        return [rank for rank, dispatcher in sorted(self._roster.present.items()) if not dispatcher.task]

    def _spread(self, state: ModelState, ranks: Sequence[int]) -> None:
        """Have the devices that are about to get a task pass the state on to each other."""
        if self._nodes:
            asked = [self._roster.present[rank].worker for rank in ranks]
            workers = [worker for worker in asked if isinstance(worker, DeviceWorker)]
            self._nodes.spread(state, workers if len(workers) == len(asked) else [])

    def _bring_state(self, rank: int, run: _Run) -> None:
        """Have the host send the state to a device to which no other has passed it on in this exchange."""
        worker = self._roster.present[rank].worker
        if self._nodes and rank not in run.spread and isinstance(worker, DeviceWorker):
            self._nodes.release(worker)

    def _begin(self, run: _Run, ranks: Sequence[int], batches: Ints) -> None:
        """Give a task to each of ``ranks`` that has a batch and samples for it."""
        if self._masked and run.asked:  # the others have their masks already
            return
        wanted = np.zeros_like(batches)
        wanted[ranks] = batches[ranks]
        dealt = self.supply.deal(wanted.tolist()) if wanted.any() else []
        coming = self._coming(run.plan.batches.tolist()) if dealt and self._coming else ()
        tasks = dict[int, Assignment]()
        for rank in ranks if dealt else ():
            if any(dealt[rank]):
                self._bring_state(rank, run)
                seed = seeds.derive(run.seed, str(rank), run.number, run.begun[rank])
                run.begun[rank] += 1
                later = tuple(found for each in coming if any(found := each[rank]))
                work = Work(
                    run.number,
                    seed,
                    self.supply.epoch,
                    dealt[rank],
                    coming=later,
                    recorded=run.recorded,
                    records=run.records,
                )
                tasks[rank] = Assignment(work, run.state)
        if tasks:
            run.asked = True
            self._reduction.expect([task.samples for task in tasks.values()])
        for rank, task in self._masking(run, tasks).items():
            self._roster.present[rank].begin(task, run.task_seconds)
            self._collection.ask(rank)
            self._begun[run.number] = self._begun.get(run.number, 0) + task.samples

    def _masking(self, run: _Run, tasks: dict[int, Assignment]) -> dict[int, Assignment]:
        """Have the workers mask what they will answer, if they are to. Returns the tasks of those that do."""
        if not self._masked or not tasks:
            return tasks
        lost, failed = self._masked.begin(self._devices(tasks), self._reduction.unit, self._reduction.bits)
        run.outcome.failed = failed
        for rank, task in tasks.items():
            dispatcher = self._roster.present[rank]
            if found := lost.get(dispatcher.worker.name):
                self._lose(run, WorkerLoss(dispatcher, task, *found), owed=True)
            elif failed:
                self.supply.requeue(rank)
        return {rank: task for rank, task in tasks.items() if rank in self._roster.present and not failed}

    def _devices(self, ranks: Iterable[int]) -> dict[str, DeviceWorker]:
        workers = (self._roster.present[rank].worker for rank in ranks)
        return {worker.name: worker for worker in workers if isinstance(worker, DeviceWorker)}

    def _next_event(self, run: _Run) -> WorkerAnswer | WorkerLoss | None:
        """Return the next answer or loss; None when the exchange is over."""
        while not self._collection.is_over(now := self._clock()):
            self._on_wait()
            left = run.began + run.plan.deadline - now
            if event := self._roster.next_event(min(left, _TICK) if left > 0 else _TICK):
                return event
        return None

    def _handle(self, run: _Run, event: WorkerAnswer | WorkerLoss) -> None:
        dispatcher = event.dispatcher
        if isinstance(event, WorkerLoss):
            self._lose(run, event, owed=self._collection.lost(dispatcher.rank))
            return
        dispatcher.task = None
        too_old = self._late.is_too_old(run.number - event.task.request.exchange)
        if self._buffer and not too_old and (loss := self._buffer.add(event, run.number)):
            self._lose(run, loss, owed=self._collection.lost(dispatcher.rank))
            return
        counts = self._collection.answered(dispatcher.rank, too_old=too_old)
        if counts:
            run.answers.append(event)
        elif not self._buffer:  # the next deadline follows those that miss this one, too
            self._batches[dispatcher.rank], self._measured[dispatcher.rank] = 0, event.seconds
        if not counts or len(run.answers) < self._late.buffer:
            self._begin(run, [dispatcher.rank], run.plan.batches)

    def _lose(self, run: _Run, loss: WorkerLoss, *, owed: bool) -> None:
        """Drop a lost worker's dispatcher, and requeue the samples that it owed."""
        run.outcome.lost.append(loss)
        self._roster.leave(loss.dispatcher.rank)
        if owed:
            self.supply.requeue(loss.dispatcher.rank)

    def _reduce(self, run: _Run) -> None:
        """Average the updates, by rank, and count those that are in the mean."""
        run.answers.sort(key=lambda answer: answer.dispatcher.rank)
        lost: list[WorkerLoss] = []
        if self._buffer:
            self._buffer.finish()
        elif self._masked:
            lost = self._unmask(run)
        else:
            lost = self._reduction.run(run.answers, run.number)
        for loss in lost:
            self._lose(run, loss, owed=True)
        refused = {loss.task for loss in lost}
        counted = [answer for answer in run.answers if answer.task not in refused]
        for answer in counted:
            self._count(run, answer)
        if counted:
            run.outcome.unused = frozenset.intersection(*(frozenset(each.update.unused) for each in counted))
        if weight := sum(answer.update.weight for answer in counted):
            steps = sum(answer.update.weight * answer.update.local_steps for answer in counted)
            run.outcome.local_steps = steps / weight

    def _unmask(self, run: _Run) -> list[WorkerLoss]:
        """Write the mean of masked updates. Returns the losses of workers whose updates are not in it: of all
        where there is none.
        """
        assert self._masked is not None
        answers = {answer.dispatcher.worker.name: answer for answer in run.answers}
        workers = self._devices(answer.dispatcher.rank for answer in run.answers)
        lost = self._masked.read(workers, run.number)
        counted = {name: answer for name, answer in answers.items() if name not in lost}
        divisor = sum(answer.update.weight for answer in counted.values())
        try:
            devices = {name: workers[name] for name in counted}
            wrong, loss, count = self._masked.finish(devices, divisor or 1.0)
        except CohortFailed as error:
            run.outcome.failed = str(error)
            for name, answer in counted.items():
                if name not in error.wrong:
                    self.supply.requeue(answer.dispatcher.rank)
            run.answers = [
                answer for name, answer in answers.items() if name not in counted or name in error.wrong
            ]
            return [answers[name].loss(*why) for name, why in lost.items()] + [
                answers[name].loss(why, for_good=True) for name, why in error.wrong.items() if name in counted
            ]
        run.outcome.loss, run.outcome.count = run.outcome.loss + loss, run.outcome.count + count
        for name, why in wrong.items():
            self._lose(run, answers[name].loss(why, for_good=True), owed=False)
        return [answers[name].loss(*why) for name, why in lost.items()]

    def _count(self, run: _Run, answer: WorkerAnswer) -> None:
        rank, samples, outcome = answer.dispatcher.rank, answer.task.samples, run.outcome
        began = answer.task.request.exchange
        self.supply.commit(rank)
        outcome.counted[rank] = outcome.counted.get(rank, 0) + samples
        outcome.ages.append(run.number - began)
        costs = DataCosts.of(answer.update, samples, answer.seconds)
        outcome.data[rank] = outcome.data.get(rank, DataCosts()) + costs
        outcome.whole = max(outcome.whole, self._begun[began])
        loss, count = answer.update.metrics[LOSS]
        outcome.loss, outcome.count = outcome.loss + loss, outcome.count + count
        self.busy[rank] = answer.update.busy
        self._batches[rank], self._measured[rank] = samples, answer.seconds
        if began == run.number:
            outcome.work = max(outcome.work, answer.update.seconds)
        else:
            outcome.late += samples

    def _end(self, run: _Run) -> None:
        """Note the workers that have not answered; where late updates do not count, requeue their samples."""
        run.outcome.missing = self._collection.end()
        under_way = self._collection.owing
        for rank in set(run.outcome.missing).difference(under_way):
            self.supply.requeue(rank)
        tasks = [self._roster.present[rank].task for rank in under_way]
        exchanges = {task.request.exchange for task in tasks if task}
        self._begun = {number: begun for number, begun in self._begun.items() if number in exchanges}
        self._reduction.keep(exchanges)


class _Run:
    """The state of one exchange."""

    def __init__(self, number: int, seed: int, state: ModelState, policy: BatchPolicy, began: float) -> None:
        self.number, self.seed, self.state, self.began = number, seed, state, began
        self.recorded: int | None = None
        self.records = True
        self.plan = policy.plan
        self.asked = False
        self.answers: list[WorkerAnswer] = []
        self.begun: Counter[int] = Counter()  # tasks, by rank
        self.spread: frozenset[int] = frozenset()  # ranks that begin with a state passed on by nodes
        self.outcome = ExchangeOutcome()

    @property
    def task_seconds(self) -> float:
        """The time limit of a task."""
        deadline = 0.0 if self.plan.deadline == math.inf else self.plan.deadline
        return max(LONGEST_SECONDS, _PATIENCE * float(self.plan.times.max()), _ROUNDS * deadline)
