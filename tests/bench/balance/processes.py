# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): real workers on this machine in lock step, under the host's own engine and policies."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.host.jobs.training.exchange_engine import ExchangeEngine, ExchangeOutcome
from millpond.host.jobs.training.planner import Planner
from millpond.host.jobs.training.roster import JobRoster
from millpond.host.jobs.training.shards import Shard, Shards
from millpond.host.workers.dispatcher import Dispatcher, WorkerLoss
from millpond.host.workers.parameter_server import ParameterServer
from millpond.host.workers.worker import LocalWorker, Worker
from millpond.linux import memory
from millpond.train.balance.profiling import Probe, Profile
from millpond.train.balance.ranges import Ranges
from millpond.train.job.spec import DataSpec, Job, ModelSpec, SynchronousSpec, TrainingSpec
from millpond.train.protocol import Folder, PrepareServer, PrepareWorker, Score
from millpond.train.worker.start import WorkerFiles, workers_zygote

_PREPARE_SECONDS = 120.0
PUBLIC = "public"


@dataclass(frozen=True, slots=True)
class Work:
    """What they train: a factory of millpond's, private folders by rank, public and held-out ones. If it is
    ``endless``, batches are as the policy likes them, of public samples, for ever.
    """

    factory: str
    arguments: dict[str, object]
    private: tuple[Path, ...]
    public: Path
    test: Path
    training: TrainingSpec
    how: SynchronousSpec
    seed: int = 1
    measure_seconds: float = 3.0
    endless: bool = False

    @property
    def job(self) -> Job:
        """As a job file says it."""
        data = DataSpec("private", str(self.test), "public")
        model = ModelSpec(self.factory, arguments=dict(self.arguments))
        return Job("bench", data, model, seed=self.seed, train=self.training, synchronous=self.how)


class Processes:
    """Workers by rank, each with its private samples and all public ones, and a parameter server.

    ``wrap`` may put something between a worker and its dispatcher.
    """

    def __init__(self, work: Work, logs: Path, wrap: Callable[[int, Worker], Worker]) -> None:
        self.work, self._logs, self._wrap = work, logs, wrap
        count = len(work.private)
        for folder in {logs, work.public.parent, work.test.parent}:
            folder.chmod(0o755)  # workers are of another user
        self._zygote = workers_zygote(60.0)
        self._states = memory.make("states")
        weakref.finalize(self, os.close, self._states)
        request = PrepareServer(work.job.work, work.job.strategy, states=count + 1)
        files, log = WorkerFiles(logs), logs / "parameter-server.log"
        self.server = ParameterServer(request, files, [work.test], log, self._zygote, self._states)
        self.server.prepare(Deadline.after(_PREPARE_SECONDS))
        self.locals = [self._start(rank) for rank in range(count)]
        self._ready = [worker.prepare(Deadline.after(_PREPARE_SECONDS)) for worker in self.locals]
        self.shards = Shards(count)
        supply = Endless(self._ready[0].parts[1]) if work.endless else self.shards
        self.roster = JobRoster(count, (), 0.0)
        self.engine = ExchangeEngine(self.roster, self.server.mean, supply, lambda: None)
        names = [f"worker{rank}" for rank in range(count)]
        self.planner = Planner(work.how, names, None if work.endless else self.shards.spread)
        self.steps = 0
        self._profiles: dict[int, Profile] = {}
        self.shards.begin(1)
        for rank in range(count):
            self.shards.add(rank, self._shards(rank))

    def _start(self, rank: int) -> LocalWorker:
        name, readable = f"worker{rank}", [self.work.private[rank], self.work.public]
        folders = (Folder(str(readable[0]), name), Folder(str(readable[1]), PUBLIC, public=True))
        request = PrepareWorker(
            self.work.job.work, name, folders, {}, self.server.tensors, states=len(self.work.private) + 1
        )
        files, log = WorkerFiles(self._logs), self._logs / f"{name}.log"
        return LocalWorker(request, files, readable, log, self._zygote, self._states)

    def _shards(self, rank: int) -> list[Shard]:
        private, public = self._ready[rank].parts
        return [Shard(f"worker{rank}", False, private), Shard(PUBLIC, True, public)]

    def measure(self) -> None:
        """Measure all, and let them take part."""
        for rank, worker in enumerate(self.locals):
            dispatcher = Dispatcher(rank, self._wrap(rank, worker), self.roster.events)
            probe = Probe(self.work.measure_seconds, self._ready[rank].samples)
            self.roster.profiler.begin(dispatcher, "process", probe, self.server.state, self._measured, _fail)
        while self.roster.profiler.dispatchers:
            self.roster.wait(1.0)

    def _measured(self, dispatcher: Dispatcher, profile: Profile) -> None:
        self._profiles[dispatcher.rank] = profile
        self._plan(dispatcher.rank)
        self.roster.join(dispatcher.rank, dispatcher)

    def _plan(self, rank: int) -> None:
        self.planner.join(rank, self._profiles[rank], 1 << 20, self.shards.samples)

    def restart_plan(self) -> None:
        """Let the planner forget all that it has seen since the workers were measured."""
        for rank in self._profiles:
            self.planner.leave(rank)
        for rank in self._profiles:
            self._plan(rank)

    def step(self) -> tuple[float, ExchangeOutcome]:
        """One step, and all the seconds that it took."""
        began = time.monotonic()
        outcome = self.engine.run(
            self.steps + 1, self.work.seed, self.server.state, self.planner, self.planner.background
        )
        for loss in outcome.lost:
            self.planner.leave(loss.dispatcher.rank)
        if outcome.samples:
            self.server.apply(outcome.samples / outcome.whole, 1, self.roster.states_in_use)
            self.steps += 1
        return time.monotonic() - began, outcome

    def epoch(self, number: int) -> Iterator[tuple[float, ExchangeOutcome]]:
        """The steps of an epoch."""
        self.shards.begin(number)
        yield from self.rest_of_epoch()

    def rest_of_epoch(self) -> Iterator[tuple[float, ExchangeOutcome]]:
        """The steps of the present epoch that are left."""
        while True:
            seconds, outcome = self.step()
            if not (outcome.samples or outcome.lost or self.engine.outstanding()):
                return
            yield seconds, outcome

    def score(self) -> Score:
        """On the held-out samples."""
        return self.server.score(str(self.work.test), {})

    def close(self) -> None:
        """End all processes."""
        for dispatcher in self.roster.present.values():
            dispatcher.end()
        for worker in (*self.locals, self.server):
            worker.close()
        self._zygote.close()


def _fail(loss: WorkerLoss) -> None:
    raise RuntimeError(loss.reason)


@contextmanager
def processes(
    work: Work, logs: Path, wrap: Callable[[int, Worker], Worker] = lambda _rank, worker: worker
) -> Iterator[Processes]:
    """Workers that end with the context."""
    with ExitStack() as stack:
        made = Processes(work, logs, wrap)
        stack.callback(made.close)
        yield made


class Endless:
    """A supply whose epochs do not end: all batches are had as they are wanted, of the public samples.
    It is always the middle of its epoch.
    """

    def __init__(self, samples: int) -> None:
        self._samples, self._at = samples, 0
        self.epoch, self.part_left = 1, 0.5

    def deal(self, batches: Sequence[int]) -> list[tuple[Ranges, ...]]:
        """See SampleSupply."""
        return [((), self._take(batch)) if batch else () for batch in batches]

    def _take(self, batch: int) -> Ranges:
        """Return the next positions, in ranges that do not go beyond the last sample."""
        found: list[tuple[int, int]] = []
        while batch:
            stop = min(self._at + batch, self._samples)
            found.append((self._at, stop))
            batch -= stop - self._at
            self._at = stop % self._samples
        return tuple(found)

    def commit(self, rank: int) -> None:
        """See SampleSupply."""

    def requeue(self, rank: int) -> None:
        """See SampleSupply."""
