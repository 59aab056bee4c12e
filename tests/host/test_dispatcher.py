# SPDX-License-Identifier: Apache-2.0
"""The dispatcher of a worker: heads that make no sense are refused; a worker that is given up is a loss."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from millpond.aggregate.unrepaired import BOUND
from millpond.base.deadline import Deadline
from millpond.base.errors import Refused
from millpond.host.workers.dispatcher import Assignment, Dispatcher, WorkerAnswer, WorkerLoss
from millpond.host.workers.worker import ModelState
from millpond.train.job.host_spec import LimitsSpec
from millpond.train.job.spec import DataSpec, Job, ModelSpec, SynchronousSpec, TrainingSpec
from millpond.train.protocol import DataTiming, StreamTiming, Update, Work
from millpond.train.update_bounds import UpdateBounds

from .steps import CountingWorker, zero_state

SIZE, SAMPLES = 100, 10
Event = WorkerAnswer | WorkerLoss


class Claiming(CountingWorker):
    """A worker whose heads say these things."""

    def __init__(self, **claims: Any) -> None:
        super().__init__("w0", [range(SIZE)], SIZE)
        self._claims = claims

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        return replace(super().train(request, state, deadline), **self._claims)


Begin = Callable[..., tuple[Dispatcher, "queue.SimpleQueue[Event]"]]
WORK = Work(1, 1, 1, (((0, SAMPLES),),))


HELD_OUT = 4
UPDATE = Update(1, SAMPLES, SAMPLES, 1.0, 1.0, 0.1, 0.0, 0, {"loss": (1.0, 1.0)})


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Dispatchers with a task for their workers, which end with the test."""
    made: list[Dispatcher] = []

    def begin(worker: CountingWorker) -> tuple[Dispatcher, queue.SimpleQueue[Event]]:
        events = queue.SimpleQueue[Event]()
        made.append(Dispatcher(len(made), worker, events, UpdateBounds(4.0, HELD_OUT)))
        made[-1].begin(Assignment(WORK, zero_state(SIZE)))
        return made[-1], events

    yield begin
    for dispatcher in made:
        dispatcher.worker.close()
        dispatcher.end()


def test_a_head_within_the_bounds_is_an_answer(begin: Begin) -> None:
    dispatcher, events = begin(Claiming(norm=1.0))
    answer = events.get(timeout=10)
    assert isinstance(answer, WorkerAnswer) and answer.dispatcher is dispatcher and answer.seconds > 0
    assert dispatcher.task is answer.task  # until who consumes the answer says otherwise


def test_a_head_beyond_the_bounds_loses_the_worker_for_good(begin: Begin) -> None:
    _, events = begin(Claiming(norm=math.inf))
    loss = events.get(timeout=10)
    assert isinstance(loss, WorkerLoss) and loss.for_good and loss.reason == f"update refused: {INFINITE}"


INFINITE = "a value is not finite (NaN or infinite) in step 1"
STATISTIC = "a buffer, such as a running statistic, is not finite (NaN or infinite) in step 1"
BEYOND = "a value is beyond 65536 per sample in step 1"
NAN = math.nan
HEADS: list[tuple[dict[str, Any], str]] = [
    ({"seconds": -1.0}, "its seconds are negative, or not finite"),
    *(
        ({"data": DataTiming(waited=share)}, "it waited for data for no share of its time")
        for share in (101, -1)
    ),
    *(
        ({"data": data}, "its figures of reading are not finite, or out of range")
        for data in (
            DataTiming(reading=NAN),
            DataTiming(samples=1 << 62),
            DataTiming(stream=StreamTiming(1, 1, math.inf, 0.0, 0.0, 0)),
        )
    ),
    ({"largest": 0.0}, ""),
    ({"largest": BOUND * SAMPLES}, ""),
    ({"largest": BOUND * SAMPLES * 1.001}, BEYOND),
    *(({"largest": value}, BEYOND) for value in (-1e-3, -1e30)),  # whatever the values are, none is within
    *(({"largest": value}, INFINITE) for value in (math.inf, NAN, -math.inf)),
    *(({"norm": value}, INFINITE) for value in (math.inf, NAN)),
    *(({"shift": value}, STATISTIC) for value in (math.inf, NAN, -1.0)),
    ({"weight": 4.0 * SAMPLES, "largest": 4.0 * BOUND * SAMPLES}, ""),  # tokens, for example
    *(
        ({"weight": value}, f"its loss counts {value:g} of {SAMPLES} samples (limits.most_count)")
        for value in (4.1 * SAMPLES, -1.0, NAN, math.inf)
    ),
    *(  # the gradients of a NaN are NaN, too
        (
            {"metrics": {"loss": pair}, "largest": NAN, "norm": NAN},
            f"its loss is not finite ({name}) in step 1",
        )
        for pair, name in (((NAN, 1.0), "NaN"), ((1.0, NAN), "NaN"), ((1.0, math.inf), "infinite"))
    ),
]


@pytest.mark.parametrize(("said", "refusal"), HEADS)
def test_a_head_says_what_can_be(said: dict[str, Any], refusal: str) -> None:
    assert UpdateBounds(4.0, HELD_OUT).refusal(WORK, replace(UPDATE, **said)) == refusal


MODEL, TASK = ModelSpec("net:Net"), ModelSpec("mytask:Task")
ROUNDS = Job("rounds", DataSpec("private/a"), task=TASK, limits=LimitsSpec(most_count=4.0))
STEPS = replace(ROUNDS, synchronous=SynchronousSpec())


@pytest.mark.parametrize(
    ("job", "most"),
    [
        (ROUNDS, 1.0),
        (replace(ROUNDS, synchronous=SynchronousSpec(local_steps=2)), 1.0),
        (replace(STEPS, task=None, model=MODEL), 1.0),
        (STEPS, 4.0),
    ],
)
def test_an_update_weighs_no_more_than_its_samples_where_the_loss_of_no_task_counts(
    job: Job, most: float
) -> None:
    """Its share of the mean would be as large as it likes, whatever limits.most_samples is."""
    bounds, update = UpdateBounds.of(job, 0), Update(1, SAMPLES, most * SAMPLES, 1.0, 1.0, 0.1, 0.0, 0)
    assert bounds.refusal(WORK, update) == ""
    heavier = bounds.refusal(WORK, replace(update, weight=1.01 * update.weight))
    if most == 1.0:
        assert heavier == f"it weighs {1.01 * SAMPLES:g}, and is of {SAMPLES} samples"
    assert heavier != ""


@pytest.mark.parametrize("normalized", [False, True])
def test_local_steps_are_bounded_by_those_that_are_possible(normalized: bool) -> None:
    """In 2 epochs of batches of 1, each step counting as much as a momentum of 0.99 lets it."""
    job = replace(ROUNDS, train=TrainingSpec(batch=1, epochs=2))
    bounds = UpdateBounds.of(job, 0, normalized=normalized)
    most = 100.0 * 2 * SAMPLES if normalized else 1.0
    update = Update(1, SAMPLES, SAMPLES, 1.0, 1.0, 0.1, 0.0, 0)
    for steps in (1.0, 0.25, most):
        assert bounds.refusal(WORK, replace(update, local_steps=steps)) == ""
    for steps in (1.01 * most, 0.0, -1.0, math.nan, math.inf):
        refusal = bounds.refusal(WORK, replace(update, local_steps=steps))
        assert refusal == f"it claims {steps:g} local steps; at most {most:g} are possible"


@pytest.mark.parametrize(("job", "unit"), [(ROUNDS, "round"), (STEPS, "step")])
def test_a_refused_update_is_told_with_its_round(job: Job, unit: str) -> None:
    bounds, update = UpdateBounds.of(job, 0), Update(1, SAMPLES, SAMPLES, math.nan, 1.0, 0.1, 0.0, 0)
    found = bounds.refusal(replace(WORK, exchange=17), update)
    assert found == f"a value is not finite (NaN or infinite) in {unit} 17"


@pytest.mark.parametrize(("code", "for_good"), [("memory", True), ("machine-memory", False)])
def test_memory_is_the_workers_own_fault_only_at_its_own_limit(
    begin: Begin, code: str, for_good: bool
) -> None:
    worker = CountingWorker("w0", [range(SIZE)], SIZE)
    worker.fail_at(1, Refused("w0", code, "out of memory"))
    _, events = begin(worker)
    loss = events.get(timeout=10)
    assert isinstance(loss, WorkerLoss) and loss.out_of_memory and loss.for_good is for_good


@pytest.mark.parametrize(
    ("samples", "metrics", "refusal"),
    [
        (4, {"accuracy": (3.0, 4.0), "loss": (5.0, 4.0)}, ""),
        (4, {"loss": (math.nan, 4.0)}, ""),
        (5, {"loss": (1.0, 5.0)}, "its score is of 5 samples; it holds out 4"),
        (-1, {"loss": (1.0, 0.0)}, "its score is of -1 samples; it holds out 4"),
        (4, {"loss": (1.0, 4.0), "f1": (1.0, 17.0)}, "its f1 counts 17 of 4 samples (limits.most_count)"),
        (4, {"loss": (1.0, -1.0)}, "its loss counts -1 of 4 samples (limits.most_count)"),
        (4, {"loss": (1.0, math.nan)}, "its loss counts nan of 4 samples (limits.most_count)"),
    ],
)
def test_a_score_is_of_what_a_worker_holds_out_without_values_and_weight(
    samples: int, metrics: dict[str, tuple[float, float]], refusal: str
) -> None:
    said = replace(UPDATE, samples=samples, weight=0.0, largest=0.0, norm=0.0, metrics=metrics)
    assert UpdateBounds(4.0, HELD_OUT).refusal(Work(1, 1, 1, (), held_out=True), said) == refusal


def test_an_abandoned_worker_is_lost_with_the_reason(begin: Begin) -> None:
    worker = CountingWorker("w0", [range(SIZE)], SIZE)
    worker.seconds = lambda samples: 30.0
    dispatcher, events = begin(worker)
    dispatcher.abandon("its agent was silent for 1.5 s")
    loss = events.get(timeout=10)
    assert isinstance(loss, WorkerLoss) and not loss.for_good
    assert loss.reason == "its agent was silent for 1.5 s" and loss.task is dispatcher.task
