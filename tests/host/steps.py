# SPDX-License-Identifier: Apache-2.0
"""Support of the tests of exchanges: workers in this process whose sums count samples, a plan that stays."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from millpond.aggregate.kernels import Vector
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, RemoteError
from millpond.host.jobs.training.collection import ALL_COUNT, LatePolicy
from millpond.host.jobs.training.exchange_engine import ExchangeEngine, ExchangeOutcome
from millpond.host.jobs.training.roster import JobRoster
from millpond.host.jobs.training.shards import Shard, Shards
from millpond.host.workers.dispatcher import Dispatcher
from millpond.host.workers.worker import ModelState
from millpond.linux import memory
from millpond.train.balance.controller import BatchPlan
from millpond.train.balance.curve import Floats, Ints
from millpond.train.protocol import Ready, Update, Work
from millpond.wire.channel import Channel


class CountingWorker:
    """The value of each position is a one at the position's own place, so a sum tells how often each is in
    it. ``folders`` are the places of its samples. Faults are given by exchange, or the number of a score.
    """

    def __init__(self, name: str, folders: Sequence[range], size: int) -> None:
        self.name, self.folders, self.size = name, folders, size
        self.asked: list[Work] = []
        self.holds, self.percent = False, 0
        self.held = 10  # samples that are held out
        self.reads: list[int] = []
        self._next = 0
        self.values = np.zeros(size, np.float32)
        self.seconds: Callable[[int], float] = lambda samples: 0.0
        self.closed = threading.Event()
        self._held: dict[int, threading.Event] = {}
        self._faults: dict[int, Exception] = {}
        self._read_faults: dict[int, tuple[int, Exception]] = {}
        self._poison: dict[int, tuple[float, bool]] = {}

    def hold_at(self, exchange: int) -> threading.Event:
        """Hold the answer to this exchange until the event is set."""
        return self._held.setdefault(exchange, threading.Event())

    def fail_at(self, exchange: int, error: Exception) -> None:
        """Raise in this exchange."""
        self._faults[exchange] = error

    def fail_reading_at(self, exchange: int, start: int, error: Exception) -> None:
        """Raise when values from ``start`` on are read in this exchange."""
        self._read_faults[exchange] = start, error

    def poison_at(self, exchange: int, value: float, *, told: bool = True) -> None:
        """Have one of the values be this one in this exchange, as its head tells or not."""
        self._poison[exchange] = value, told

    def prepare(self, deadline: Deadline) -> Ready:
        return Ready(tuple(map(len, self.folders)))

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        began = time.monotonic()
        self.asked.append(request)
        samples, exchange = request.samples, request.exchange
        if held := self._held.get(exchange):
            assert held.wait(30)
        if self.closed.wait(self.seconds(samples)):
            raise ConnectionLost(f"{self.name} was closed")
        if fault := self._faults.get(exchange):
            raise fault
        self.values[:] = 0.0
        for places, ranges in zip(self.folders, request.ranges, strict=False):
            for start, stop in ranges:
                self.values[places.start + start : places.start + stop] += 1.0
        poison, told = self._poison.get(exchange, (0.0, True))
        largest = max(1.0, float(self.values.max()) + (poison if told else 0.0))
        self.values[0] += poison
        norm = float(np.linalg.norm(self.values))
        metrics = {"loss": (2.0 * samples, float(samples))}
        self.holds = False
        seconds = time.monotonic() - began
        if request.held_out:
            metrics = {"accuracy": (float(self.held // 2), float(self.held)), "loss": (1.5, float(self.held))}
            return Update(exchange, self.held, 0.0, 0.0, 0.0, seconds, math.nan, 0, metrics)
        largest = math.nan if told and not math.isfinite(poison) else largest
        return Update(exchange, samples, samples, largest, norm, seconds, math.nan, 1000 * samples, metrics)

    def fetch(self, stop: int, deadline: Deadline) -> None:
        self._next = 0

    def read(self, out: Vector, deadline: Deadline) -> None:
        start, self._next = self._next, self._next + len(out)
        self.reads.append(start)
        at, fault = self._read_faults.get(self.asked[-1].exchange, (-1, None))
        if fault and start == at:
            raise fault
        if self.closed.is_set():
            raise ConnectionLost(f"{self.name} was closed")
        out[:] = self.values[start : start + len(out)]

    def close(self) -> None:
        self.closed.set()
        for held in self._held.values():
            held.set()


class Given:
    """A policy whose plan stays; ``shown`` are the batches that it was told times of, by rank,
    and ``left`` the parts of the epoch that were left.
    """

    def __init__(self, *batches: int, seconds: float = 1000.0, deadline: float = math.inf) -> None:
        planned = np.array(batches, np.int64)
        self.plan = BatchPlan(planned, np.where(planned > 0, seconds, 0.0), deadline)
        self.shown: list[dict[int, int]] = []
        self.left: list[float] = []

    def observe(
        self, batches: Ints, measured: Floats, busy: Floats | None = None, left: float = 1.0, /
    ) -> bool:
        self.left.append(left)
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

    def __init__(self, private: Sequence[int], public: int = 0, *, late: LatePolicy = ALL_COUNT) -> None:
        ends = np.cumsum([0, *private, public]).tolist()
        self.size = max(ends[-1], 1)
        self.mean = np.empty(self.size, np.float32)
        self._places = [range(start, end) for start, end in itertools.pairwise(ends)]
        self.shards = Shards(len(private))
        self.on_wait: Callable[[], None] = lambda: None
        self.roster, self._skipped = JobRoster(len(private), range(len(private)), 0.0), 0.0
        self.engine = ExchangeEngine(
            self.roster, self.mean, self.shards, lambda: self.on_wait(), late=late, clock=self._clock
        )
        self.counted: Counter[int] = Counter()
        self.exchanges = 0
        self.states: list[ModelState] = []
        self.shards.begin(1)
        self.workers: dict[int, CountingWorker] = {}
        self._made: list[Dispatcher] = []
        for rank in range(len(private)):
            self.join(rank)

    def join(self, rank: int) -> CountingWorker:
        """Make a worker, for the first time or instead of one that was lost."""
        private, public = self._places[rank], self._places[-1]
        worker = CountingWorker(f"w{rank}", (private, public), self.size)
        found = [Shard(worker.name, False, len(private)), Shard("all", True, len(public))]
        assert self.shards.add(rank, found) == ""
        dispatcher = Dispatcher(rank, worker, self.roster.events)
        self.workers[rank] = worker
        self.roster.join(rank, dispatcher)
        self._made.append(dispatcher)
        return worker

    def run(
        self,
        policy: Given,
        rest: Sequence[int] = (),
        enough: Callable[[Sequence[int]], bool] = bool,
        *,
        recorded: int | None = None,
        records: bool = True,
    ) -> ExchangeOutcome:
        """Run an exchange; its mean says which samples were counted, and agrees with its outcome."""
        self.exchanges += 1
        beside = np.array(rest or np.zeros_like(policy.plan.batches), np.int64)
        state = zero_state(self.size)
        self.states.append(state)
        outcome = self.engine.run(
            self.exchanges, 7, state, policy, beside, enough, recorded=recorded, records=records
        )
        if outcome.samples:
            sums = self.mean * outcome.samples
            often = np.rint(sums).astype(int)
            assert np.allclose(sums, often, atol=1e-3)
            assert int(often.sum()) == outcome.samples
            self.counted.update({place: times for place, times in enumerate(often.tolist()) if times})
        return outcome

    def run_until_late(self, policy: Given, *late: int) -> ExchangeOutcome:
        """Run an exchange whose deadline passes as soon as these workers alone have not answered, however
        long that takes.
        """

        def pass_deadline() -> None:
            if [dispatcher.rank for dispatcher in self.engine.outstanding()] == [*late]:
                self._skipped = 1e6

        before, self.on_wait = self.on_wait, pass_deadline
        try:
            return self.run(policy)
        finally:
            self.on_wait, self._skipped = before, 0.0

    def _clock(self) -> float:
        return time.monotonic() + self._skipped

    def finish(self, policy: Given) -> list[ExchangeOutcome]:
        """Run exchanges until the epoch is over."""
        outcomes = []
        while (outcome := self.run(policy)).samples or outcome.lost:
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


class DialledDevice:
    """A device as ``DeviceWorker`` dials it: ``answer`` serves each message of its connections."""

    name = "csd0"

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def answer(self, host: Channel) -> None:
        """Receive one message, and answer it."""
        raise NotImplementedError

    def control(self, deadline: Deadline) -> Channel:
        near, far = socket.socketpair()
        self._threads.append(threading.Thread(target=self._serve, args=(far,)))
        self._threads[-1].start()
        return Channel(near, self.name)

    def bulk(self, token: bytes, tls: bool, deadline: Deadline) -> Channel:
        assert token == b"the token" and not tls
        return self.control(deadline)

    def _serve(self, far: socket.socket) -> None:
        with Channel(far, "the host") as host, contextlib.suppress(RemoteError):
            while True:
                self.answer(host)

    def ended(self) -> bool:
        for thread in self._threads:
            thread.join(10)
        return not any(thread.is_alive() for thread in self._threads)
