# SPDX-License-Identifier: Apache-2.0
"""A group's batches: tried out, then of equal times, always of the same sum."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from millpond.train.distributed.tuner import BatchTuner

Line = tuple[float, float]
"""Seconds of a step without samples, and of each sample."""


def train(
    tuner: BatchTuner, lines: Sequence[Line], steps: int, noise: Sequence[float] = (1.0,)
) -> list[float]:
    """The seconds of the ranks in the last step."""
    total = sum(tuner.batches)
    for step in range(steps):
        batches, scale = tuner.batches, noise[step % len(noise)]
        assert sum(batches) == total and min(batches) >= 2
        seconds = [
            (start + each * batch) * scale for (start, each), batch in zip(lines, batches, strict=True)
        ]
        tuner.observe(batches, seconds)
    return seconds


def test_after_ten_steps_all_take_as_long() -> None:
    lines = [(0.02, 0.001), (0.01, 0.004), (0.1, 0.002), (0.0, 0.001)]
    tuner = BatchTuner(400, 4, balanced=True)
    seconds = train(tuner, lines, 11)
    assert sum(tuner.batches) == 400
    assert max(seconds) < 1.03 * min(seconds)


def test_steps_that_were_disturbed_do_not_move_the_plan() -> None:
    lines = [(0.02, 0.001), (0.02, 0.003)]
    quiet, disturbed = BatchTuner(80, 2, balanced=True), BatchTuner(80, 2, balanced=True)
    train(quiet, lines, 10)
    train(disturbed, lines, 10, noise=(9.0, 1.0, 1.0, 1.0, 6.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    assert disturbed.batches == pytest.approx(quiet.batches, abs=1)


def test_where_all_batches_take_as_long_they_stay_about_equal() -> None:
    tuner = BatchTuner(96, 3, balanced=True)
    train(tuner, [(0.010, 0.0), (0.011, 0.0), (0.0105, 0.0)], 12)
    assert sum(tuner.batches) == 96
    assert min(tuner.batches) > 10


def test_who_is_too_slow_for_two_samples_takes_two_and_is_seen_when_it_is_faster() -> None:
    tuner = BatchTuner(60, 3, balanced=True)
    fast = (0.01, 0.001)
    train(tuner, [fast, fast, (2.0, 0.5)], 10)
    assert tuner.batches == (29, 29, 2)
    train(tuner, [fast, fast, fast], 40)
    assert min(tuner.batches) >= 10


def test_others_take_the_samples_of_who_has_none() -> None:
    tuner = BatchTuner(12, 3, balanced=False)
    assert tuner.among([True, True, True]) == tuner.batches == (4, 4, 4)
    assert tuner.among([True, False, True]) == (6, 0, 6)
    assert tuner.among([False, False, True]) == (0, 0, 12)


def test_fixed_batches_stay() -> None:
    tuner = BatchTuner(13, 3, balanced=False)
    train(tuner, [(0.0, 0.1), (0.0, 1.0), (0.0, 9.0)], 50)
    assert sorted(tuner.batches) == [4, 4, 5]
