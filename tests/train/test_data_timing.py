# SPDX-License-Identifier: Apache-2.0
"""What the data of an exchange cost a worker: measured shares, and what of them may leave a device."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from millpond.train.determinism import generators
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.prefetch import ReadingMeter
from millpond.train.local.selection import SampleFolders
from millpond.train.protocol import DataTiming, Folder, StreamTiming, Update, Work
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.task.structure import size_of
from millpond.train.task.task import Task

SAMPLES, GROUP, BATCH = 48, 4, 8
LONG, SHORT = 0.004, 0.0
"""Seconds that reading a sample, or training on one, takes in these tests."""
ROUND = WorkSpec("tests", ModelSpec("none:none"), optimizer=OptimizerSpec("sgd", 0.05), passes=2, batch=BATCH)
STEP = replace(ROUND, passes=0, batch=0, accumulate=4)
STREAM = StreamTiming(256, 1 << 20, 1.25e8, 0.001, 0.0001, 3)


class Sleeping:
    """Samples that take ``read`` seconds each to read, and a task whose loss takes ``train`` seconds each."""

    def __init__(self, read: float, train: float) -> None:
        self.read, self.train = read, train

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.read)
        return torch.full((6,), float(index)), index % 2

    @staticmethod
    def model() -> nn.Module:
        return nn.Linear(6, 2)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        time.sleep(self.train * len(batch[1]))
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


class Streamed(Sleeping):
    stream_timing = STREAM


@pytest.fixture(scope="module", autouse=True)
def deterministic() -> None:
    generators.be_deterministic(1)


def exchange(samples: Sleeping, work: WorkSpec, fast: int = 1 << 20) -> Update:
    task = Task(samples)
    folders = SampleFolders(task, 0, [Folder("p", "csd0", group=GROUP)], [samples])
    torch.manual_seed(0)
    trainer = LocalTrainer(FlatParameters(samples.model()), task, folders, work, fast=fast)
    return trainer.run(Work(0, 3, 1, (((0, SAMPLES),),)), trainer.parameters.state.copy())


@pytest.mark.serial
@pytest.mark.parametrize("work", [ROUND, STEP], ids=["round", "step"])
def test_a_worker_with_slow_data_waits_and_one_with_fast_data_does_not(work: WorkSpec) -> None:
    slow, fast = exchange(Sleeping(LONG, SHORT), work).data, exchange(Sleeping(SHORT, LONG), work).data
    assert slow.waited > 75 and fast.waited < 25
    assert (slow.stalled, slow.mini_epochs, slow.fitting, slow.stream) == (0, 0, 0, None)
    passes = max(work.passes, 1)
    assert slow.samples == passes * SAMPLES and slow.batches == passes * (6 if work.passes else 4)
    assert slow.size == pytest.approx(passes * SAMPLES * (6 * 4 + 8), rel=0.05)
    assert slow.reading >= 0.95 * passes * SAMPLES * LONG


@pytest.mark.serial
def test_threads_that_read_ahead_hide_what_is_faster_than_training() -> None:
    found = exchange(Sleeping(LONG / 4, LONG), replace(ROUND, prefetch=2)).data
    assert found.waited < 40  # the first batch of each pass, and the load of this machine
    assert exchange(Sleeping(LONG / 4, LONG / 40), replace(ROUND, prefetch=1)).data.waited > 60


@pytest.mark.serial
def test_mini_epochs_wait_for_the_flash_once_a_round() -> None:
    work = replace(ROUND, mini_epoch=16)
    slow = exchange(Sleeping(LONG, SHORT), work).data
    assert slow.stalled > 75 and slow.waited >= slow.stalled and slow.mini_epochs == 3
    assert slow.samples == pytest.approx(SAMPLES + 8, rel=0.05), "and those that are measured"
    assert slow.fitting >= 16
    often = exchange(Sleeping(LONG / 8, LONG), replace(work, passes=4)).data
    assert often.stalled < 25
    samples = Sleeping(SHORT, SHORT)
    few = exchange(samples, work, fast=2 * 8 * size_of(samples[0])).data
    assert few.mini_epochs == SAMPLES // 8 and 8 <= few.fitting < 12


def test_a_score_tells_of_no_reading() -> None:
    samples = Sleeping(SHORT, SHORT)
    task = Task(samples)
    folders = SampleFolders(task, 0, [Folder("p", "csd0", group=GROUP)], [samples], held=0.5)
    trainer = LocalTrainer(FlatParameters(samples.model()), task, folders, ROUND)
    trainer.run(Work(0, 3, 1, (((0, 8),),)), trainer.parameters.state.copy())
    scored = trainer.run(Work(1, 3, 1, (), held_out=True), trainer.parameters.state.copy())
    assert scored.samples and scored.data == DataTiming()


def test_a_data_set_that_is_a_stream_tells_what_was_chosen() -> None:
    assert exchange(Streamed(SHORT, SHORT), ROUND).data.stream == STREAM.rounded()


NUMBERS = some.one_of(some.integers(-(1 << 63), 1 << 64), some.integers(0, 200))
FLOATS = some.floats(allow_nan=True, allow_infinity=True)
STREAMS = some.builds(StreamTiming, NUMBERS, NUMBERS, FLOATS, FLOATS, FLOATS, NUMBERS)


@given(
    some.builds(
        DataTiming, NUMBERS, NUMBERS, FLOATS, *([NUMBERS] * 5), stream=some.one_of(some.none(), STREAMS)
    )
)
def test_whatever_a_worker_says_leaves_in_range_and_with_two_digits(said: DataTiming) -> None:
    told = said.rounded()
    assert told.fault == "" and told.rounded() == told
    figures = [told.reading, told.samples, told.size, told.batches, told.mini_epochs, told.fitting]
    if told.stream:
        figures += [told.stream.chunk, told.stream.window, told.stream.bandwidth]
    assert all(float(f"{value:.1e}") == value for value in figures)


@pytest.mark.parametrize(
    "wrong",
    [
        {"waited": 101},
        {"waited": -1},
        {"waited": 10, "stalled": 11},
        {"reading": math.nan},
        {"reading": math.inf},
        {"reading": -1.0},
        {"samples": -1},
        {"size": 1 << 60},
        {"stream": replace(STREAM, idle=101)},
        {"stream": replace(STREAM, latency=math.nan)},
        {"stream": replace(STREAM, chunk=-1)},
    ],
)
def test_figures_that_are_none_are_a_fault(wrong: dict[str, Any]) -> None:
    fine = DataTiming(43, 10, 1.5, 100, 3200, 10, 2, 50, STREAM)
    assert fine.fault == "" and replace(fine, **wrong).fault


def test_a_meter_begins_anew_with_each_exchange_and_knows_no_share_of_no_time() -> None:
    meter = ReadingMeter()
    assert [meter.read(lambda: np.zeros(4, np.float32), 2).nbytes, *meter.batches(iter("ab"))] == [
        16,
        "a",
        "b",
    ]
    found = meter.timing(0.0)
    assert (found.waited, found.samples, found.size, found.batches) == (0, 2, 16, 2)
    assert meter.timing(1e-9).waited == 100
    meter.begin()
    assert meter.timing(1.0) == DataTiming()
