# SPDX-License-Identifier: Apache-2.0
"""Workers are profiled before they take part, on synthetic samples."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import numpy as np
import pytest

from millpond.base.errors import ConnectionLost
from millpond.host.jobs.training.profiler import MEASURE, Profiler
from millpond.host.workers.dispatcher import Dispatcher, WorkerAnswer, WorkerLoss
from millpond.train.balance.profiling import Probe, Profile

from .steps import CountingWorker, Given, Team, zero_state

STATE = zero_state(100)


class Measured:
    """Workers with 30 private and 70 public samples that are measured, and what came of it."""

    def __init__(self, count: int) -> None:
        self.events: queue.SimpleQueue[WorkerAnswer | WorkerLoss] = queue.SimpleQueue()
        self.workers = [CountingWorker(f"w{n}", (range(30), range(30, 100)), 100) for n in range(count)]
        self.dispatchers = [Dispatcher(rank, w, self.events) for rank, w in enumerate(self.workers)]
        self.done: dict[str, Profile] = {}
        self.lost: list[WorkerLoss] = []
        self.profiler = Profiler()

    def _done(self, dispatcher: Dispatcher, profile: Profile) -> None:
        assert dispatcher not in self.profiler and dispatcher.task is None
        self.done[dispatcher.worker.name] = profile

    def begin(self, most: int = 100, seconds: float = 0.5) -> None:
        for dispatcher in self.dispatchers:
            probe = Probe(seconds, most)
            self.profiler.begin(dispatcher, "virtual", probe, STATE, self._done, self.lost.append)

    def finish(self) -> None:
        while self.profiler.dispatchers:
            self.profiler.handle(self.events.get(timeout=20))


@pytest.fixture
def two() -> Iterator[Measured]:
    measured = Measured(2)
    yield measured
    for dispatcher in measured.dispatchers:
        dispatcher.worker.close()
        dispatcher.end()


def test_profiles_tell_batches_seconds_and_memory(two: Measured) -> None:
    for factor, worker in enumerate(two.workers, 1):
        worker.seconds = lambda samples, factor=factor: factor * (0.004 + 0.0005 * samples)
    two.begin()
    assert two.profiler.ranks == {0, 1}
    two.finish()
    first, second = two.done["w0"], two.done["w1"]
    assert (first.worker, first.kind) == ("w0", "virtual")
    # A busy machine decides which batches these are; tests/train/test_profiling.py has exact seconds.
    batches = [point.batch for point in first.points]
    assert batches[0] == 2 and len(batches) > 2 and batches == sorted(set(batches))
    for profile, factor in ((first, 1), (second, 2)):
        for point in profile.points:
            assert point.seconds >= factor * (0.004 + 0.0005 * point.batch)
            assert point.peak_bytes >= 1000 * point.batch
    assert two.lost == []


def test_no_sample_of_the_workers_is_used(two: Measured) -> None:
    for worker in two.workers:
        worker.seconds = lambda samples: 0.01  # the larger, the faster: a busy machine does not hide it
    two.begin(most=40, seconds=5)
    two.finish()
    for worker in two.workers:
        assert {(request.exchange, request.ranges) for request in worker.asked} == {(MEASURE, ())}
        assert max(request.samples for request in worker.asked) == 40
        assert worker.reads == []


def test_one_that_is_lost_meanwhile_is_told_and_others_go_on(two: Measured) -> None:
    two.workers[0].fail_at(MEASURE, ConnectionLost("w0 was switched off"))
    two.begin()
    two.finish()
    assert [(loss.dispatcher, loss.reason) for loss in two.lost] == [
        (two.dispatchers[0], "w0 was switched off")
    ]
    assert set(two.done) == {"w1"}


def test_sums_that_are_not_finite_show_here_already(two: Measured) -> None:
    two.workers[0].poison_at(MEASURE, np.nan)
    two.begin()
    two.finish()
    assert [loss.for_good for loss in two.lost] == [True]


def test_with_too_few_samples_it_is_done_at_once_without_points(two: Measured) -> None:
    two.begin(most=1)
    assert {name: profile.points for name, profile in two.done.items()} == {"w0": (), "w1": ()}
    assert not two.profiler.dispatchers and not two.workers[0].asked


def test_steps_go_on_while_a_newcomer_is_measured_and_its_sums_count_for_nothing() -> None:
    team = Team([60, 60])
    joined: list[Profile] = []
    newcomer, profiler = team.roster.present[1], team.roster.profiler
    team.roster.leave(1)
    team.workers[0].seconds = lambda samples: 0.02
    state = zero_state(team.size)
    done = lambda _, profile: joined.append(profile)  # noqa: E731
    profiler.begin(newcomer, "virtual", Probe(0.05, 120), state, done, print)
    try:
        while not joined and team.shards.left:
            assert set(team.run(Given(2, 0)).counted) <= {0}
        assert joined and not profiler.dispatchers
        team.roster.join(1, newcomer)
        team.finish(Given(4, 4))
        assert team.once
    finally:
        team.close()
