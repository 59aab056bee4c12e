# SPDX-License-Identifier: Apache-2.0
"""The dispatcher of a worker: heads that make no sense are refused; a worker that is given up is a loss."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from millpond.base.deadline import Deadline
from millpond.host.workers.dispatcher import BOUND, Dispatcher, Task, WorkerAnswer, WorkerLoss
from millpond.host.workers.worker import ModelState
from millpond.train.protocol import Update, Work

from .steps import CountingWorker, zero_state

SIZE, SAMPLES = 100, 10
Event = WorkerAnswer | WorkerLoss


class Claiming(CountingWorker):
    """A worker whose heads say ``largest`` and ``norm``."""

    def __init__(self, largest: float, norm: float) -> None:
        super().__init__("w0", [range(SIZE)], SIZE)
        self._largest, self._norm = largest, norm

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        return replace(super().train(request, state, deadline), largest=self._largest, norm=self._norm)


Begin = Callable[[CountingWorker], tuple[Dispatcher, "queue.SimpleQueue[Event]"]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Dispatchers with a task for their workers, which end with the test."""
    made: list[Dispatcher] = []

    def begin(worker: CountingWorker) -> tuple[Dispatcher, queue.SimpleQueue[Event]]:
        events = queue.SimpleQueue[Event]()
        made.append(Dispatcher(len(made), worker, events))
        made[-1].begin(Task(Work(1, 1, 1, (((0, SAMPLES),),)), zero_state(SIZE)))
        return made[-1], events

    yield begin
    for dispatcher in made:
        dispatcher.worker.close()
        dispatcher.end()


@pytest.mark.parametrize("largest", [0.0, 1.0, BOUND * SAMPLES])
def test_a_head_within_the_bound_is_an_answer(begin: Begin, largest: float) -> None:
    dispatcher, events = begin(Claiming(largest, 1.0))
    answer = events.get(timeout=10)
    assert isinstance(answer, WorkerAnswer) and answer.dispatcher is dispatcher
    assert answer.update.largest == largest and answer.seconds > 0
    assert dispatcher.task is answer.task  # until who consumes the answer says otherwise


@pytest.mark.parametrize(
    ("largest", "norm"),
    [
        (BOUND * SAMPLES * 1.001, 1.0),
        (math.inf, 1.0),
        (math.nan, 1.0),
        (-1e-3, 1.0),  # whatever the values are, none is within a negative bound
        (-1e30, 1.0),
        (-math.inf, 1.0),
        (1.0, math.inf),
        (1.0, math.nan),
    ],
)
def test_a_head_beyond_the_bound_is_refused_for_good(begin: Begin, largest: float, norm: float) -> None:
    _, events = begin(Claiming(largest, norm))
    loss = events.get(timeout=10)
    assert isinstance(loss, WorkerLoss) and loss.for_good
    assert loss.reason.startswith("update refused: a value is not finite, or beyond 65536 per sample")


def test_who_is_abandoned_is_lost_with_the_reason(begin: Begin) -> None:
    worker = CountingWorker("w0", [range(SIZE)], SIZE)
    worker.seconds = lambda samples: 30.0
    dispatcher, events = begin(worker)
    dispatcher.abandon("its agent was silent for 1.5 s")
    loss = events.get(timeout=10)
    assert isinstance(loss, WorkerLoss) and not loss.for_good
    assert loss.reason == "its agent was silent for 1.5 s" and loss.task is dispatcher.task
