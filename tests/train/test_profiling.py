# SPDX-License-Identifier: Apache-2.0
"""A few measurements give a worker's curve, within its seconds, samples and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from millpond.train.balance.curve import Curve
from millpond.train.balance.profiling import Point, Probe, largest

FIRST = 1.2
"""How many times as long the first step with a batch takes."""


def rising(batch: int) -> float:
    return 0.2 + 0.001 * batch


def saturating(batch: int) -> float:
    """As fast as it gets, but for 1 %, at 256."""
    return 0.005 + 0.002 * batch


def falling(batch: int) -> float:
    """MobileNetV2 at 224 pixels: 11 images a second, 6 at 32."""
    return batch / (11 - 5 * min(1.0, batch / 32))


def stepping(batch: int) -> float:
    """Twice as long from 17 on: the line from 16 to 32 would be wrong."""
    return 0.01 + 0.001 * batch * (1 if batch <= 16 else 2)


@dataclass
class Worker:
    """It takes ``time`` of a batch, and its process never gives memory back."""

    time: Callable[[int], float]
    noise: float = 0.0
    base: int = 300
    per_sample: int = 2
    measured: list[int] = field(default_factory=list)
    spent: float = 0.0

    def run(self, probe: Probe) -> Probe:
        source = np.random.default_rng(1)
        while (batch := probe.next()) is not None:
            assert len(self.measured) < 1000
            seconds = self.time(batch) * max(0.5, source.normal(1, self.noise))
            seconds *= 1 if batch in self.measured else FIRST
            self.measured.append(batch)
            self.spent += seconds
            probe.add(batch, seconds, self.base + self.per_sample * max(self.measured))
        return probe


def curve(probe: Probe) -> Curve:
    return Curve.fit((point.batch, point.seconds) for point in probe.points)


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("time", [rising, saturating, falling])
@pytest.mark.parametrize("seconds", [3.0, 10.0])
def test_the_best_speed_is_found_within_the_seconds(
    time: Callable[[int], float], noise: float, seconds: float
) -> None:
    worker = Worker(time, noise)
    found = curve(worker.run(Probe(seconds, 1024)))
    assert worker.spent <= seconds * 1.25
    reached = [batch for batch in range(2, 1025) if batch <= max(worker.measured)]
    best = max(batch / time(batch) for batch in reached)
    assert found.peak / time(found.peak) >= 0.95 * best
    assert found.time(np.array(worker.measured)) == pytest.approx([time(b) for b in worker.measured], rel=0.1)


def test_a_rising_curve_is_followed_as_far_as_the_samples_go() -> None:
    assert Worker(rising).run(Probe(60, 700)).points[-1].batch == 700


def test_a_curve_that_saturates_or_falls_is_left_behind_its_peak() -> None:
    assert Worker(saturating).run(Probe(60, 100_000)).points[-1].batch == 1024
    worker = Worker(falling)
    assert curve(worker.run(Probe(60, 1000))).peak == 2
    assert max(worker.measured) == 8


def test_one_disturbed_batch_is_not_taken_for_the_end() -> None:
    worker = Worker(lambda batch: rising(batch) * (2 if batch == 64 else 1))
    assert worker.run(Probe(60, 1000)).points[-1].batch == 1000


def test_where_the_curve_bends_it_is_measured_more_finely() -> None:
    bent = {point.batch for point in Worker(stepping).run(Probe(5, 64)).points}
    straight = {point.batch for point in Worker(rising).run(Probe(60, 64)).points}
    assert {12, 24} <= bent
    assert straight == {2, 4, 8, 16, 32, 48, 64}


def test_the_first_measurement_of_a_batch_does_not_count_and_short_ones_are_repeated() -> None:
    short = Worker(lambda batch: 0.001)
    assert short.run(Probe(10, 4)).points[0] == Point(2, 0.001, 304)
    assert [short.measured.count(batch) for batch in (2, 4)] == [6, 6]
    long = Worker(lambda batch: batch / 2)
    assert long.run(Probe(10, 4)).points[-1] == Point(4, 2.0, 308)
    assert [long.measured.count(batch) for batch in (2, 4)] == [2, 2]


def test_the_middle_of_repeats_counts() -> None:
    probe = Probe(1000, 2)
    for seconds in (9.0, 0.1, 0.7, 0.2, 0.15, 0.12):
        assert probe.next() == 2
        probe.add(2, seconds, 0)
    assert probe.points == (Point(2, 0.15, 0),)


@pytest.mark.parametrize("samples", [0, 1])
def test_a_worker_with_fewer_than_two_samples_is_not_measured(samples: int) -> None:
    probe = Probe(10, samples)
    assert (probe.next(), probe.points, probe.most) == (None, (), samples)


@pytest.mark.parametrize("samples", [2, 3, 5])
def test_no_batch_has_more_than_the_samples(samples: int) -> None:
    worker = Worker(rising)
    assert worker.run(Probe(20, samples)).points[-1].batch == samples == max(worker.measured)


def test_without_time_there_is_still_one_point() -> None:
    worker = Worker(rising)
    probe = worker.run(Probe(0.01, 100))
    assert worker.measured == [2, 2]
    assert curve(probe).time(np.array(2)) == pytest.approx(rising(2))


@given(some.integers(0, 500), some.integers(1, 60), some.integers(0, 2000))
def test_memory_is_never_exceeded_once_its_line_is_known(base: int, per_sample: int, memory: int) -> None:
    worker = Worker(saturating, base=base, per_sample=per_sample)
    probe = worker.run(Probe(5, 200, memory))
    fits = (memory - base) // per_sample
    assert max(worker.measured) <= max(fits, 4)
    if max(worker.measured) > 2:
        assert probe.most == (min(fits, 200) if fits >= 2 else 0)
    else:
        assert probe.most == 0 or fits >= 2


def test_a_mark_from_before_the_probe_hides_only_the_first_batches() -> None:
    probe = Probe(20, 1000, 900)
    while (batch := probe.next()) is not None:
        probe.add(batch, rising(batch), max(500, 300 + 3 * batch))
    assert {point.batch: point.peak_bytes for point in probe.points}[64] == 500
    assert probe.most == 200


def test_a_profile_that_was_kept_says_what_fits_in_another_memory() -> None:
    points = (Point(2, 0.1, 300), Point(4, 0.1, 310))
    assert [largest(points, 100, memory) for memory in (None, 410, 314, 299, 10**6)] == [100, 24, 4, 0, 100]
    assert [largest(points[:1], 100, memory) for memory in (299, 300)] == [0, 100]


def test_memory_of_a_batch_measured_after_a_larger_one_is_on_the_line() -> None:
    worker = Worker(falling)
    probe = worker.run(Probe(60, 1000))
    assert worker.measured[-1] < max(worker.measured)
    assert all(point.peak_bytes == 300 + 2 * point.batch for point in probe.points)
