# SPDX-License-Identifier: Apache-2.0
"""Support of the tests of steps: workers in this process whose sums count samples, and a plan that stays."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, ProtocolError
from millpond.host.jobs.synchronous.shards import Shard, Shards
from millpond.host.jobs.synchronous.step_engine import StepEngine, StepOutcome
from millpond.host.workers.dispatcher import Dispatcher
from millpond.host.workers.worker import ModelState
from millpond.linux import memory
from millpond.train.balance.controller import BatchPlan
from millpond.train.balance.curve import Floats, Ints
from millpond.train.protocol import Compute, Computed, Ready, Trained
from millpond.train.reduce.exact import Vector


class CountingWorker:
    """The gradient of each sample is a one at the sample's own place, so a sum tells how often each is in it.
    ``folders`` are the places of its samples. What goes wrong is given by step.
    """

    def __init__(self, name: str, folders: Sequence[range], size: int) -> None:
        self.name, self.folders, self.size = name, folders, size
        self.asked: list[Compute] = []
        self._sums = np.empty(size, np.float32)
        self.seconds: Callable[[int], float] = lambda samples: 0.0
        self.closed = threading.Event()
        self._held: dict[int, threading.Event] = {}
        self._faults: dict[int, Exception] = {}
        self._values: dict[int, float] = {}

    def hold_at(self, step: int) -> threading.Event:
        """Its answer to this step waits until the event is set."""
        return self._held.setdefault(step, threading.Event())

    def fail_at(self, step: int, error: Exception) -> None:
        """It raises in this step."""
        self._faults[step] = error

    def poison_at(self, step: int, value: float) -> None:
        """One of its sums is this value in this step."""
        self._values[step] = value

    def prepare(self, deadline: Deadline) -> Ready:
        parts = tuple(map(len, self.folders))
        return Ready(sum(parts), (), self.size, parts=parts)

    def compute(self, request: Compute, state: ModelState, deadline: Deadline) -> tuple[Computed, Vector]:
        began = time.monotonic()
        self.asked.append(request)
        samples = sum(map(len, request.samples))
        if held := self._held.get(request.step):
            assert held.wait(30)
        if self.closed.wait(self.seconds(samples)):
            raise ConnectionLost(f"{self.name} was closed")
        if fault := self._faults.get(request.step):
            raise fault
        self._sums[:] = 0.0
        for places, indices in zip(self.folders, request.samples, strict=True):
            np.add.at(self._sums, places.start + np.array(indices, np.int64), 1.0)
        self._sums[0] += self._values.get(request.step, 0.0)
        seconds = time.monotonic() - began
        computed = Computed(request.step, samples, 2.0 * samples, seconds, math.nan, 1000 * samples)
        return computed, self._sums

    def train(self, round_number: int, state: Vector, deadline: Deadline) -> Trained:
        raise ProtocolError(f"{self.name} does steps only")

    def receive_state(self, into: Vector, deadline: Deadline) -> None:
        raise ProtocolError(f"{self.name} does steps only")

    def close(self) -> None:
        self.closed.set()
        for held in self._held.values():
            held.set()


class Given:
    """A policy whose plan stays; ``shown`` are the batches that it was told times of, by rank."""

    def __init__(self, *batches: int, seconds: float = 1000.0, deadline: float = math.inf) -> None:
        planned = np.array(batches, np.int64)
        self.plan = BatchPlan(planned, np.where(planned > 0, seconds, 0.0), deadline)
        self.shown: list[dict[int, int]] = []

    def observe(self, batches: Ints, measured: Floats, busy: Floats | None = None, /) -> bool:
        told = np.flatnonzero(np.isfinite(measured)).tolist()
        self.shown.append({rank: int(batches[rank]) for rank in told})
        return False


def zero_state(size: int) -> ModelState:
    """A state of ``size`` zeros, alone in its memory."""
    descriptor = memory.make("a state")
    try:
        return ModelState(memory.map_first(descriptor, 4 * size).part(0, 4 * size))
    finally:
        os.close(descriptor)


class Team:
    """Workers by rank, with so many ``private`` samples each, and ``public`` ones that all can read."""

    def __init__(self, private: Sequence[int], public: int = 0) -> None:
        ends = np.cumsum([0, *private, public]).tolist()
        self.size = max(ends[-1], 1)
        self.mean = np.empty(self.size, np.float32)
        self._places = [range(start, end) for start, end in itertools.pairwise(ends)]
        self.shards = Shards(1, len(private))
        self.on_wait: Callable[[], None] = lambda: None
        self.engine = StepEngine(len(private), self.mean, self.shards, lambda: self.on_wait())
        self.counted: Counter[int] = Counter()
        self.steps = 0
        self.states: list[ModelState] = []
        self.shards.begin(1)
        self.workers: dict[int, CountingWorker] = {}
        self._made: list[Dispatcher] = []
        for rank in range(len(private)):
            self.join(rank)

    def join(self, rank: int) -> CountingWorker:
        """A new worker, for the first time or instead of one that was lost."""
        private, public = self._places[rank], self._places[-1]
        worker = CountingWorker(f"w{rank}", (private, public), self.size)
        found = [Shard(worker.name, False, len(private)), Shard("all", True, len(public))]
        assert self.shards.add(rank, found) == ""
        dispatcher = Dispatcher(rank, worker, self.engine.events)
        self.workers[rank], self.engine.dispatchers[rank] = worker, dispatcher
        self._made.append(dispatcher)
        return worker

    def step(self, policy: Given, rest: Sequence[int] = ()) -> StepOutcome:
        """A step; what was counted in it is told by its mean, and agrees with its outcome."""
        self.steps += 1
        beside = np.array(rest or np.zeros_like(policy.plan.batches), np.int64)
        state = zero_state(self.size)
        self.states.append(state)
        outcome = self.engine.step(self.steps, 7, state, policy, beside)
        if outcome.samples:
            self.engine.average()
            sums = self.mean * outcome.samples
            often = np.rint(sums).astype(int)
            assert np.allclose(sums, often, atol=1e-3)
            assert int(often.sum()) == outcome.samples
            self.counted.update({place: times for place, times in enumerate(often.tolist()) if times})
        return outcome

    def finish(self, policy: Given) -> list[StepOutcome]:
        """Step until the epoch is over."""
        outcomes = []
        while (outcome := self.step(policy)).samples or outcome.lost:
            outcomes.append(outcome)
        return outcomes

    @property
    def once(self) -> bool:
        """Whether each sample was counted exactly once."""
        return self.counted == Counter(range(self.size))

    def close(self) -> None:
        """End all threads."""
        for dispatcher in self._made:
            dispatcher.worker.close()
            dispatcher.end()
