# SPDX-License-Identifier: Apache-2.0
"""Medians and trimmed means of updates: one vote for each worker, whatever it claims or sends."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from millpond.aggregate.kernels import Vector
from millpond.aggregate.reduction import Addend, Reduction
from millpond.aggregate.rules import TrimmedMeanOfRows, rule_of
from millpond.base.deadline import Deadline
from millpond.host.jobs.training.reduction import UpdateReduction
from millpond.host.workers.dispatcher import WorkerAnswer, WorkerLoss

from .test_reduction import SIZE, Answer, Holder, answer, holders

__all__ = ["answer"]

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
        lost = Reduction(result, threads, TrimmedMeanOfRows(0.5)).run(addends)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert lost == [] and np.allclose(result, 1 + (count - 1) / 2000)
    assert peak < 2.5 * result.nbytes + 200_000


def test_blocks_of_an_encoding_are_not_divided() -> None:
    for block in (1, 1 << 10, 1 << 13):
        for size, count, threads in ((100_000, 1000, 1), (1 << 21, 10, 4), (300, 2, 1)):
            found = TrimmedMeanOfRows(0.5, block).range_values(size, count, threads)
            assert found % block == 0 and found.bit_count() == 1
