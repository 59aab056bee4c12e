# SPDX-License-Identifier: Apache-2.0
"""The dispatcher of a worker: heads that make no sense are refused; a worker that is given up is a loss."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import Refused
from millpond.host.workers.dispatcher import Assignment, Dispatcher, WorkerAnswer, WorkerLoss
from millpond.host.workers.worker import ModelState
from millpond.train.job.spec import DataSpec, Job, LimitsSpec, ModelSpec, SynchronousSpec, TrainingSpec
from millpond.train.protocol import Update, Work
from millpond.train.update_bounds import BOUND, UpdateBounds

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


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Dispatchers with a task for their workers, which end with the test."""
    made: list[Dispatcher] = []

    def begin(
        worker: CountingWorker, request: Work = WORK, most_count: float = 4.0
    ) -> tuple[Dispatcher, queue.SimpleQueue[Event]]:
        events = queue.SimpleQueue[Event]()
        made.append(Dispatcher(len(made), worker, events, UpdateBounds(most_count, HELD_OUT)))
        made[-1].begin(Assignment(request, zero_state(SIZE)))
        return made[-1], events

    yield begin
    for dispatcher in made:
        dispatcher.worker.close()
        dispatcher.end()


@pytest.mark.parametrize("largest", [0.0, 1.0, BOUND * SAMPLES])
def test_a_head_within_the_bound_is_an_answer(begin: Begin, largest: float) -> None:
    dispatcher, events = begin(Claiming(largest=largest, norm=1.0))
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
    _, events = begin(Claiming(largest=largest, norm=norm))
    loss = events.get(timeout=10)
    assert isinstance(loss, WorkerLoss) and loss.for_good
    finite = math.isfinite(largest) and math.isfinite(norm)
    fault = "beyond 65536 per sample" if finite else "not finite (NaN or infinite)"
    assert loss.reason == f"update refused: a value is {fault} in step 1"


@pytest.mark.parametrize("most", [4.0, math.inf])
def test_a_loss_may_count_so_much_per_sample(begin: Begin, most: float) -> None:
    """Of tokens, for example: the values are sums over them."""
    weight = 4.0 * SAMPLES
    _, events = begin(Claiming(weight=weight, largest=BOUND * weight), most_count=most)
    assert isinstance(events.get(timeout=10), WorkerAnswer)


@pytest.mark.parametrize("weight", [4.1 * SAMPLES, -1.0, math.nan, math.inf])
def test_a_loss_that_counts_more_is_refused_for_good(begin: Begin, weight: float) -> None:
    _, events = begin(Claiming(weight=weight))
    loss = events.get(timeout=10)
    assert isinstance(loss, WorkerLoss) and loss.for_good
    assert loss.reason == (
        f"update refused: its loss counts {weight:g} of {SAMPLES} samples (limits.most_count)"
    )


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


@pytest.mark.parametrize(
    ("pair", "name"), [((math.nan, 1.0), "NaN"), ((1.0, math.nan), "NaN"), ((1.0, math.inf), "infinite")]
)
def test_a_loss_that_is_not_finite_is_refused_and_called_that(
    begin: Begin, pair: tuple[float, float], name: str
) -> None:
    """Before: 'a value is not finite, or beyond 65536 per sample', as the gradients of a NaN are NaN, too."""
    _, events = begin(Claiming(metrics={"loss": pair}, largest=math.nan, norm=math.nan))
    loss = events.get(timeout=10)
    assert isinstance(loss, WorkerLoss) and loss.for_good
    assert loss.reason == f"update refused: its loss is not finite ({name}) in step 1"


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


@pytest.mark.parametrize("most", [4.0, math.inf])
def test_a_score_has_no_values_and_no_weight(begin: Begin, most: float) -> None:
    metrics = {"accuracy": (3.0, 4.0), "loss": (5.0, 4.0)}
    claims = {"samples": 4, "weight": 0.0, "largest": 0.0, "norm": 0.0, "metrics": metrics}
    _, events = begin(Claiming(**claims), Work(1, 1, 1, (), held_out=True), most)
    answer = events.get(timeout=10)
    assert isinstance(answer, WorkerAnswer) and answer.update.metrics == metrics


@pytest.mark.parametrize(
    ("samples", "metrics", "text"),
    [
        (5, {"loss": (1.0, 5.0)}, "its score is of 5 samples; it holds out 4"),
        (-1, {"loss": (1.0, 0.0)}, "its score is of -1 samples; it holds out 4"),
        (4, {"loss": (1.0, 4.0), "f1": (1.0, 17.0)}, "its f1 counts 17 of 4 samples (limits.most_count)"),
        (4, {"loss": (1.0, -1.0)}, "its loss counts -1 of 4 samples (limits.most_count)"),
        (4, {"loss": (1.0, math.nan)}, "its loss counts nan of 4 samples (limits.most_count)"),
    ],
)
def test_a_score_of_more_than_a_worker_holds_out_is_refused(
    begin: Begin, samples: int, metrics: dict[str, tuple[float, float]], text: str
) -> None:
    claims = {"samples": samples, "weight": 0.0, "largest": 0.0, "norm": 0.0, "metrics": metrics}
    _, events = begin(Claiming(**claims), Work(1, 1, 1, (), held_out=True))
    loss = events.get(timeout=10)
    assert isinstance(loss, WorkerLoss) and loss.for_good and loss.reason.endswith(text)


def test_a_score_may_be_not_finite(begin: Begin) -> None:
    claims = {"samples": 4, "weight": 0.0, "largest": 0.0, "norm": 0.0, "metrics": {"loss": (math.nan, 4.0)}}
    _, events = begin(Claiming(**claims), Work(1, 1, 1, (), held_out=True))
    assert isinstance(events.get(timeout=10), WorkerAnswer)


def test_who_is_abandoned_is_lost_with_the_reason(begin: Begin) -> None:
    worker = CountingWorker("w0", [range(SIZE)], SIZE)
    worker.seconds = lambda samples: 30.0
    dispatcher, events = begin(worker)
    dispatcher.abandon("its agent was silent for 1.5 s")
    loss = events.get(timeout=10)
    assert isinstance(loss, WorkerLoss) and not loss.for_good
    assert loss.reason == "its agent was silent for 1.5 s" and loss.task is dispatcher.task
