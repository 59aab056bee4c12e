"""Equal-time batches, and the controller that re-tunes them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from millpond.train.balance.controller import Controller
from millpond.train.balance.curve import Curve
from millpond.train.balance.equal_time import LEAST_BATCH, Crew, Kind
from millpond.train.balance.slowness import Slowness

HOST = Curve((20, 60, 180), (0.9, 2.0, 5.39))  # 33.4 img/s at 180
DEVICE = Curve((2, 5, 15), (1.2, 2.2, 5.4))  # 2.78 img/s at 15


@some.composite
def curves(draw: some.DrawFn) -> Curve:
    batches = sorted(draw(some.sets(some.integers(1, 512), min_size=1, max_size=8)))
    steps = draw(some.lists(some.floats(1e-4, 10), min_size=len(batches), max_size=len(batches)))
    return Curve(tuple(batches), tuple(float(time) for time in np.cumsum(steps)))


@some.composite
def crews(draw: some.DrawFn) -> Crew:
    kinds = draw(some.lists(some.builds(Kind, curves(), some.integers(2, 600)), min_size=1, max_size=3))
    members = draw(some.lists(some.integers(0, len(kinds) - 1), min_size=1, max_size=12))
    return Crew(kinds, members)


def levels(crew: Crew, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 4, crew.size)


@given(curves())
def test_a_curve_goes_through_its_points_and_ascends(curve: Curve) -> None:
    assert np.allclose(curve.time(np.array(curve.batches)), curve.seconds, rtol=1e-9)
    times = curve.time(np.arange(1, 600))
    assert np.all(np.diff(times) > 0) and times[0] > 0
    assert curve.time(np.array(0)) == 0


@given(some.lists(some.tuples(some.integers(1, 64), some.floats(1e-3, 9)), min_size=1, max_size=30))
def test_any_measurements_make_a_curve(measured: list[tuple[int, float]]) -> None:
    assert Curve.fit(measured) == Curve.fit(reversed(measured))


def test_measurements_that_make_no_curve_are_refused() -> None:
    for measured in ([], [(0, 1.0)], [(4, 0.0)], [(4, -1.0)]):
        with pytest.raises(ValueError, match=r"curve|batches|times"):
            Curve.fit(measured)


def test_the_peak_is_where_more_samples_bring_no_more_speed() -> None:
    assert Curve.fit([(1, 0.1), (4, 0.3), (16, 1.0), (32, 2.0), (64, 5.0)]).peak == 16
    falling = Curve.fit([(1, 0.091), (8, 0.9), (32, 5.3)])  # large images
    assert falling.peak == 1 and falling.speed == pytest.approx(11, rel=0.01)


@given(crews(), some.integers(0, 2**32))
def test_nobody_takes_longer_than_the_step_and_nobody_could_do_more(crew: Crew, seed: int) -> None:
    slowness = levels(crew, seed)
    seconds = crew.step_seconds(slowness)
    batches = crew.batches(seconds, slowness)
    assert np.all(crew.times(batches, slowness) <= seconds * (1 + 1e-9))
    assert np.all((batches == 0) | (batches >= LEAST_BATCH)) and np.all(batches <= crew.caps)
    more = np.where(batches > 0, batches + 1, LEAST_BATCH)
    could = (more <= crew.caps) & (crew.times(more, slowness) < seconds * (1 - 1e-9))
    assert not could.any()


@given(crews(), some.integers(0, 2**32), some.floats(0, 1))
def test_a_fixed_global_batch_is_met_exactly(crew: Crew, seed: int, part: float) -> None:
    slowness = levels(crew, seed)
    total = 2 * (LEAST_BATCH + int(part * (int(crew.caps.sum()) - LEAST_BATCH))) // 2
    try:
        batches = crew.batches_of(total, slowness)
    except ValueError as error:
        assert "possible" in str(error) or "odd" in str(error)
        return
    assert batches.sum() == total
    assert np.all((batches == 0) | (batches >= LEAST_BATCH)) and np.all(batches <= crew.caps)


def test_the_most_influential_kind_sets_the_step() -> None:
    few, many = (
        Crew([Kind(HOST, 999), Kind(DEVICE, 999)], [0, 1, 1]),
        Crew([Kind(HOST, 999), Kind(DEVICE, 999)], [0] + 36 * [1]),
    )
    assert few.step_seconds(np.ones(3)) == pytest.approx(5.39)
    assert many.step_seconds(np.ones(37)) == pytest.approx(5.4)
    assert many.batches(5.4, np.ones(37)).tolist() == [180] + 36 * [15]


def test_who_has_no_time_for_two_samples_sits_out() -> None:
    crew = Crew([Kind(DEVICE, 15)], [0, 0, 0])
    slowness = np.array([1.0, 1.0, 9.0])
    assert crew.batches(5.4, slowness).tolist() == [15, 15, 0]
    assert crew.batches(5.4, slowness / 2).tolist()[2] > 0


def test_ten_thousand_quiet_steps_change_nothing() -> None:
    noise = np.random.default_rng(1)
    controller = Controller(Crew([Kind(HOST, 999), Kind(DEVICE, 999)], [0] + 36 * [1]))
    before = controller.plan
    for _ in range(10_000):
        assert not controller.observe(
            before.batches, before.times * np.maximum(noise.normal(1, 0.1, 37), 0.5)
        )
    assert controller.plan is before


@pytest.mark.parametrize(("speed", "gone", "back"), [(0.25, 1, 3), (0.57, 2, 4), (0.81, 10, 16)])
def test_a_slowdown_is_found_and_so_is_power_that_comes_back(speed: float, gone: int, back: int) -> None:
    noise = np.random.default_rng(2)
    controller = Controller(Crew([Kind(DEVICE, 999)], [0, 0, 0]))
    normal = controller.plan.batches.copy()
    for real, most in ((np.array([1.0, 1.0, 1 / speed]), gone), (np.ones(3), back)):
        found = []
        for step in range(1, 80):
            took = controller.crew.times(controller.plan.batches, real) * noise.normal(1, 0.03, 3)
            if controller.observe(controller.plan.batches, took):
                found.append(step)
        assert found[0] <= most
        assert controller.slowness == pytest.approx(real, rel=0.05)
    assert np.all(np.abs(controller.plan.batches - normal) <= 1)


def test_who_is_absent_is_not_judged() -> None:
    slowness = Slowness(np.ones(2))
    for _ in range(100):
        assert not slowness.observe(np.array([1.0, 1.0]), np.array([1.0, math.nan]))
    assert slowness.level.tolist() == [1.0, 1.0]
