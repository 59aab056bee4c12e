# SPDX-License-Identifier: Apache-2.0
"""The mean of updates, and votes on it: exact in every order, without a trace of workers that are lost."""

from __future__ import annotations

import queue
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from millpond.aggregate import reduction
from millpond.aggregate.exact import ExactSum, scale_of
from millpond.aggregate.kernels import Vector
from millpond.aggregate.reduction import Addend, Reduction
from millpond.aggregate.rules.catalogue import rule_of
from millpond.aggregate.rules.rule import LEAST_RANGE, MOST_RANGE
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, DeadlineExceeded
from millpond.host.jobs.training.reduction import UpdateReduction
from millpond.host.workers.dispatcher import Assignment, Dispatcher, WorkerAnswer, WorkerLoss
from millpond.host.workers.worker import ModelState
from millpond.train.protocol import Ready, Update, Work

from .steps import zero_state

__all__ = ["answer"]

SIZE = 3 * LEAST_RANGE + 1000
STATE = zero_state(1)


class Holder:
    """A worker that has finished with ``values``, of ``samples`` samples."""

    def __init__(self, name: str, values: Vector, samples: int = 10) -> None:
        self.name, self.values, self.samples, self.weight = name, values, samples, float(samples)
        self.holds = False
        self.reads: list[int] = []
        self.next = self.pulls = 0
        self.faults_of_pull: dict[int, int] = {}  # where a pull fails, -1 before its first value
        self.fault_at: dict[int, Exception] = {}
        self.seconds = 0.0

    def prepare(self, deadline: Deadline) -> Ready:
        raise AssertionError

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        raise AssertionError

    def fetch(self, stop: int, deadline: Deadline) -> None:
        self.next = 0
        self.pulls += 1
        if (start := self.faults_of_pull.get(self.pulls)) is not None:
            if start < 0:
                raise ConnectionLost("gone")
            self.fault_at[start] = ConnectionLost("gone")

    def read(self, out: Vector, deadline: Deadline) -> None:
        start, self.next = self.next, self.next + len(out)
        self.reads.append(start)
        if fault := self.fault_at.pop(start, None):
            raise fault
        left = deadline.remaining()
        assert left is not None
        if self.seconds > left:
            time.sleep(left)
            raise DeadlineExceeded(f"{self.name} did not answer in time")
        time.sleep(self.seconds)
        out[:] = self.values[start : start + len(out)]

    def close(self) -> None:
        pass


Answer = Callable[[Holder], WorkerAnswer]


@pytest.fixture(autouse=True, params=[1, 4])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The threads of each reduction."""
    monkeypatch.setattr(reduction, "_LEAST_THREADED", 0)
    monkeypatch.setattr(reduction, "MOST_THREADS", request.param)
    monkeypatch.setattr(reduction.os, "sched_getaffinity", lambda _: range(8))
    found: int = request.param
    return found


@pytest.fixture
def answer() -> Iterator[Answer]:
    """Answers of holders, whose dispatchers end with the test."""
    made: list[Dispatcher] = []

    def answer(holder: Holder) -> WorkerAnswer:
        made.append(Dispatcher(len(made), holder, queue.SimpleQueue[WorkerAnswer | WorkerLoss]()))
        values = holder.values
        largest, norm = float(np.abs(values).max()), float(np.linalg.norm(values.astype(np.float64)))
        update = Update(1, holder.samples, holder.weight, largest, norm, 0.1, 0.0, 0, {"loss": (1.0, 1.0)})
        task = Assignment(Work(1, 1, 1, (((0, holder.samples),),)), STATE)
        return WorkerAnswer(made[-1], task, update, 0.1)

    yield answer
    for dispatcher in made:
        dispatcher.end()


def holders(count: int, seed: int = 1) -> list[Holder]:
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.integers(-6, 3, (count, 1))
    values = (rng.normal(size=(count, SIZE)) * scales).astype(np.float32)
    return [Holder(f"w{n}", values[n], 5 + n) for n in range(count)]


def mean_of(answers: list[WorkerAnswer], clip: float | None = None) -> tuple[Vector, list[WorkerLoss]]:
    mean = np.full(SIZE, np.nan, np.float32)
    return mean, UpdateReduction(mean, clip).run(answers, 1)


def test_the_mean_is_over_samples_and_has_the_same_bits_in_every_order(answer: Answer) -> None:
    answers = [answer(holder) for holder in holders(5)]
    mean, lost = mean_of(answers)
    assert lost == []
    samples = sum(each.update.samples for each in answers)
    total = sum(each.dispatcher.worker.values.astype(np.float64) for each in answers)  # type: ignore[attr-defined]
    assert np.allclose(mean, total / samples, rtol=1e-6, atol=1e-12)
    for _ in range(4):
        random.Random(1).shuffle(answers)
        assert mean_of(answers)[0].tobytes() == mean.tobytes()


@pytest.mark.parametrize("largest_shift", [0.5, 1e5])
def test_parameters_beside_buffers_have_the_bits_of_a_tree_of_nodes(
    answer: Answer, largest_shift: float
) -> None:
    """Nodes add all values in one unit, also those of buffers, which may change by much more."""
    workers, end = holders(3), SIZE - 50
    for each in workers:
        each.values[end:] *= np.float32(largest_shift / np.abs(each.values[end:]).max())
    bounds = [(np.abs(e.values[:end]).max(), np.abs(e.values[end:]).max()) for e in workers]
    total, expected, mean = ExactSum(SIZE), np.empty(SIZE, np.float32), np.empty(SIZE, np.float32)
    total.begin(scale_of(float(max(map(max, bounds))), len(workers)))
    for each, bound in zip(workers, bounds, strict=True):
        total.add(each.values, 1.0, float(max(bound)))
    total.divide(sum(each.weight for each in workers), expected)
    answers = [
        replace(found, update=replace(found.update, largest=float(largest), shift=float(shift)))
        for found, (largest, shift) in zip(map(answer, workers), bounds, strict=True)
    ]
    assert not UpdateReduction(mean, parameters=end).run(answers, answers[0].task.request.exchange)
    assert mean.tobytes() == expected.tobytes()


def test_the_mean_is_over_what_the_losses_count(answer: Answer) -> None:
    """Of tokens, which are not as many in each sample; a loss that counts nothing has no part in it."""
    first, second, third = holders(3)
    first.weight, second.weight, third.weight = 100.0, 17.0, 0.0
    third.values[:] = 0.0
    mean, lost = mean_of([answer(holder) for holder in (first, second, third)])
    total = first.values.astype(np.float64) + second.values
    assert lost == [] and np.allclose(mean, total / 117, rtol=1e-6, atol=1e-12)
    assert (mean_of([answer(third)])[0] == 0).all()


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("loses", [1, 2])
def test_a_worker_that_is_lost_in_the_middle_leaves_no_trace(answer: Answer, place: int, loses: int) -> None:
    all_of_them = holders(4)
    expected, _ = mean_of([answer(holder) for holder in all_of_them[loses:]])
    for holder in all_of_them[:loses]:
        holder.fault_at[place * LEAST_RANGE] = ConnectionLost("gone")
    mean, lost = mean_of([answer(holder) for holder in all_of_them])
    assert [loss.dispatcher.worker.name for loss in lost] == [f"w{n}" for n in range(loses)]
    assert not any(loss.for_good for loss in lost)
    assert mean.tobytes() == expected.tobytes()
    first, again = 4, 4 + place + 1  # the ranges until the loss are read once more
    begun = reduction.MOST_THREADS - 1  # and those that other threads had begun, but no others
    assert first + again <= len(all_of_them[3].reads) <= first + min(again + begun, 4 + 4)


@pytest.mark.parametrize("second", ["fetch", "read"])
def test_a_worker_that_is_lost_when_values_are_pulled_again_leaves_no_trace(
    answer: Answer, second: str
) -> None:
    first, other, honest = holders(3)
    expected, _ = mean_of([answer(honest)])
    first.fault_at[LEAST_RANGE] = ConnectionLost("gone")
    other.faults_of_pull[2] = 0 if second == "read" else -1
    mean, lost = mean_of([answer(holder) for holder in (first, other, honest)])
    assert [loss.dispatcher.worker.name for loss in lost] == ["w0", "w1"]
    assert mean.tobytes() == expected.tobytes()


def test_an_update_cannot_get_around_its_norm_by_a_loss_in_a_second_pull(answer: Answer) -> None:
    first, liar, honest = holders(3)
    liar.values[:], honest.values[:] = 0.0, 1e-3
    expected, _ = mean_of([answer(honest)], 1.0)
    told = answer(liar)
    liar.values[2 * LEAST_RANGE :] = 1000.0
    lies = replace(told, update=replace(told.update, largest=1000.0, norm=1e-3))
    first.fault_at[0] = ConnectionLost("gone")
    liar.faults_of_pull[2] = -1
    mean, lost = mean_of([answer(first), lies, answer(honest)], 1.0)
    assert len(lost) == 2 and mean.tobytes() == expected.tobytes()


def test_values_that_are_pulled_again_have_the_time_of_a_pull(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "TRANSFER_SECONDS", 0.3)
    monkeypatch.setattr(reduction, "SLOWEST", 1e12)
    slow, bad = holders(2)
    slow.seconds = 0.05
    bad.fault_at[3 * LEAST_RANGE] = ConnectionLost("gone")
    _, lost = mean_of([answer(slow), answer(bad)])
    assert [loss.dispatcher.worker.name for loss in lost] == ["w1"]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_values_beyond_the_announced_are_refused_by_name(answer: Answer, value: float) -> None:
    honest, liar = holders(2)
    expected, _ = mean_of([answer(honest)])
    answers = [answer(honest), answer(liar)]
    liar.values[-1] = value
    mean, (loss,) = mean_of(answers)
    assert loss.for_good and loss.reason == ("update refused: its values are beyond those it has announced")
    assert mean.tobytes() == expected.tobytes()


def test_an_update_is_scaled_down_to_its_norm_and_a_wrong_norm_is_refused(answer: Answer) -> None:
    small, large = holders(2)
    small.values[:], large.values[:] = 1e-6, 1.0
    answers = [answer(small), answer(large)]
    clip = float(np.linalg.norm(large.values)) / large.samples / 2
    mean, lost = mean_of(answers, clip)
    assert lost == [] and np.allclose(mean, (1e-6 + 0.5) / (5 + 6), rtol=1e-4)
    large.values[:] = 1.0
    told = answer(large)
    lies = WorkerAnswer(told.dispatcher, told.task, Update(1, 6, 6, 1.0, 0.1, 0.1, 0.0, 0), 0.1)
    mean, (loss,) = mean_of([answers[0], lies], clip)
    assert loss.for_good and "its norm is not as announced" in loss.reason
    assert np.allclose(mean, 1e-6 / 5, rtol=1e-4)
    small.values[:] = 1e-23  # whose squares are 0 in a worker's float32
    told = answer(small)
    tiny = WorkerAnswer(told.dispatcher, told.task, replace(told.update, norm=0.0), 0.1)
    assert mean_of([tiny], clip)[1] == []


@pytest.mark.parametrize("seconds", [0.04, 0.4], ids=["trickle", "stall"])
def test_those_that_trickle_or_stall_are_lost_and_nobody_else(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(reduction, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(reduction, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(reduction, "TRANSFER_SECONDS", 0.1)
    monkeypatch.setattr(reduction, "SLOWEST", 1e9)
    slow, honest = holders(5)[:3], holders(5)[3:]
    for holder in slow:
        holder.seconds = seconds
    expected, _ = mean_of([answer(holder) for holder in honest])
    mean, lost = mean_of([answer(holder) for holder in (*slow, *honest)])
    assert sorted(loss.dispatcher.worker.name for loss in lost) == ["w0", "w1", "w2"]
    assert mean.tobytes() == expected.tobytes()


def test_many_that_stall_are_waited_for_together(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time of a holder is what its deadline would have let pass."""
    monkeypatch.setattr(reduction, "SLOWEST", 1e12)
    waited: list[float] = []

    class Stuck(Holder):
        def read(self, out: Vector, deadline: Deadline) -> None:
            waited.append(deadline.remaining() or 0.0)
            clock[0] += waited[-1]
            raise DeadlineExceeded(f"{self.name} did not answer in time")

    clock = [0.0]
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + clock[0])
    honest, *others = holders(9)
    stuck = [Stuck(holder.name, holder.values) for holder in others]
    _, lost = mean_of([answer(holder) for holder in (*stuck, honest)])
    assert [loss.dispatcher.worker.name for loss in lost] == [holder.name for holder in stuck]
    assert waited[0] == pytest.approx(reduction.STALL_SECONDS, abs=0.5)
    assert waited[1:] == pytest.approx(7 * [reduction.GRACE_SECONDS], abs=0.2)


@pytest.mark.expected_log("w0: internal error")
def test_an_error_of_ours_is_logged_and_costs_one_worker(answer: Answer) -> None:
    first, second = holders(2)
    first.fault_at[LEAST_RANGE] = ZeroDivisionError("of ours")
    mean, (loss,) = mean_of([answer(first), answer(second)])
    assert loss.reason == "of ours"
    assert mean.tobytes() == mean_of([answer(second)])[0].tobytes()


def test_after_a_loss_ranges_are_read_in_order_so_that_each_worker_is_asked_once_more(answer: Answer) -> None:
    first, second = holders(2)
    first.fault_at[2 * LEAST_RANGE] = ConnectionLost("gone")
    mean_of([answer(first), answer(second)])
    reads = [start // LEAST_RANGE for start in second.reads]
    assert reads[:7] == [0, 1, 2, 3, 0, 1, 2]
    assert reads[7:] in ([], [3])  # another thread may have begun the last one


def test_the_memory_of_a_reduction_does_not_grow_with_workers_or_values(answer: Answer, threads: int) -> None:
    class Made(Holder):
        def read(self, out: Vector, deadline: Deadline) -> None:
            out[:] = 0.5

    mean = np.full(64 * MOST_RANGE, np.nan, np.float32)
    answers = [answer(Made(f"w{number}", np.full(1, 0.5, np.float32), 10)) for number in range(20)]
    tracemalloc.start()
    try:
        lost = UpdateReduction(mean).run(answers, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert lost == [] and (mean == np.float32(0.05)).all()
    own = 4 * MOST_RANGE + 8 * MOST_RANGE  # a buffer and an exact sum
    assert peak < 1.1 * threads * own < mean.nbytes / 4


VOTES = pytest.mark.parametrize(("rule", "share"), [("median", 0.0), ("trimmed", 0.2), ("trimmed", 0.45)])


def voted(
    answers: list[WorkerAnswer], rule: str, share: float, clip: float | None = None
) -> tuple[Vector, list[WorkerLoss]]:
    mean = np.full(SIZE, np.nan, np.float32)
    return mean, UpdateReduction(mean, clip, rule_of(rule, share)).run(answers, 1)


def alike(count: int) -> list[Holder]:
    """Workers with differences around 1, times samples that differ."""
    rng = np.random.default_rng(2)
    found = []
    for number in range(count):
        samples = 5 + number
        values = rng.normal(1.0, 0.1, SIZE) * samples
        found.append(Holder(f"w{number}", values.astype(np.float32), samples))
    return found


def per_sample(workers: list[Holder]) -> np.ndarray:
    return np.sort([worker.values.astype(np.float64) / worker.samples for worker in workers], axis=0)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 11])
@VOTES
def test_each_coordinate_is_of_those_in_the_middle_in_every_order(
    answer: Answer, rule: str, share: float, count: int
) -> None:
    workers = holders(count)
    answers = [answer(holder) for holder in workers]
    found, lost = voted(answers, rule, share)
    rows = per_sample(workers)
    if rule == "median":
        expected = np.median(rows, axis=0)
    else:
        cut = min(int(np.ceil(share * count)), (count - 1) // 2)
        expected = rows[cut : count - cut].mean(axis=0)
    assert lost == [] and (np.abs(found - expected) <= 1e-6 * np.abs(rows).max(axis=0)).all()
    for _ in range(3):
        random.Random(1).shuffle(answers)
        assert voted(answers, rule, share)[0].tobytes() == found.tobytes()


@pytest.mark.parametrize("sent", [6e4, -6e4, 0.0, "noise"])
@VOTES
def test_one_of_five_that_sends_garbage_moves_nothing_beyond_the_others(
    answer: Answer, rule: str, share: float, sent: float | str
) -> None:
    *honest, liar = alike(5)
    noise = np.random.default_rng(3).normal(0, 1e4, SIZE)
    liar.values[:] = (noise if sent == "noise" else float(sent)) * liar.samples
    rows = per_sample(honest)
    found, lost = voted([answer(holder) for holder in (*honest, liar)], rule, share)
    assert lost == [] and (found >= rows[0] - 1e-6).all() and (found <= rows[-1] + 1e-6).all()


@VOTES
def test_a_weight_is_no_more_than_a_vote(answer: Answer, rule: str, share: float) -> None:
    workers = alike(5)
    answers = [answer(holder) for holder in workers]
    expected, _ = voted(answers, rule, share)
    for weight in (0.0, 1e-300, float(workers[4].samples), 1e30):
        update = replace(answers[4].update, weight=weight)
        found, lost = voted([*answers[:4], replace(answers[4], update=update)], rule, share)
        assert lost == [] and found.tobytes() == expected.tobytes()


@VOTES
def test_votes_are_scaled_down_to_the_norm_of_a_sample(answer: Answer, rule: str, share: float) -> None:
    workers = alike(3)
    clip = float(np.linalg.norm(workers[0].values)) / workers[0].samples / 2
    found, lost = voted([answer(holder) for holder in workers], rule, share, clip)
    assert lost == [] and float(np.linalg.norm(found)) <= clip * 1.001
    assert float(np.abs(found - 0.5).max()) < 0.3


class Made:
    """A source whose values are made as they are read, slightly different for each."""

    def __init__(self, number: int) -> None:
        self.name, self._value = f"w{number}", np.float32(1 + number / 1000)

    def fetch(self, stop: int, deadline: Deadline) -> None:
        pass

    def read(self, out: Vector, deadline: Deadline) -> None:
        out[:] = self._value


@pytest.mark.parametrize(("size", "count", "threads"), [(1 << 18, 9, 1), (1 << 18, 40, 2), (50_000, 200, 1)])
def test_the_rows_of_any_number_of_workers_are_a_few_models(size: int, count: int, threads: int) -> None:
    result = np.full(size, np.nan, np.float32)
    addends = [Addend(Made(number), 1.0, 2.0, 1.0) for number in range(count)]
    tracemalloc.start()
    try:
        lost = Reduction(result, threads, rule_of("median")).run(addends)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert lost == [] and np.allclose(result, 1 + (count - 1) / 2000)
    assert peak < 2.5 * result.nbytes + 200_000


def test_blocks_of_an_encoding_are_not_divided() -> None:
    for block in (1, 1 << 10, 1 << 13):
        for size, count, threads in ((100_000, 1000, 1), (1 << 21, 10, 4), (300, 2, 1)):
            found = rule_of("median", 0.0, block).range_values(size, count, threads)
            assert found % block == 0 and found.bit_count() == 1
