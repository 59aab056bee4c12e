# SPDX-License-Identifier: Apache-2.0
"""Equal-time batches, and the controller that re-tunes them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from millpond.train.balance.controller import PROBE, BalanceController
from millpond.train.balance.curve import Curve
from millpond.train.balance.equal_time import (
    LEAST_BATCH,
    QUANTILES,
    SHORTEST,
    WORTH_IT,
    Cohort,
    Measured,
    WorkerKind,
    kinds_of,
)
from millpond.train.balance.slowness import Slowness

HOST = Curve((20, 60, 180), (0.9, 2.0, 5.39))  # 33.4 img/s at 180
DEVICE = Curve((2, 5, 15), (1.2, 2.2, 5.4))  # 2.78 img/s at 15


@some.composite
def curves(draw: some.DrawFn) -> Curve:
    batches = sorted(draw(some.sets(some.integers(1, 512), min_size=1, max_size=8)))
    steps = draw(some.lists(some.floats(1e-4, 10), min_size=len(batches), max_size=len(batches)))
    return Curve(tuple(batches), tuple(float(time) for time in np.cumsum(steps)))


@some.composite
def crews(draw: some.DrawFn) -> Cohort:
    kinds = draw(some.lists(some.builds(WorkerKind, curves(), some.integers(2, 600)), min_size=1, max_size=3))
    members = draw(some.lists(some.integers(0, len(kinds) - 1), min_size=1, max_size=12))
    return Cohort(kinds, members)


def host_and(devices: int) -> Cohort:
    return Cohort([WorkerKind(HOST, 999), WorkerKind(DEVICE, 999)], [0] + devices * [1])


def speed(cohort: Cohort, seconds: float, slowness: np.ndarray) -> float:
    return float(cohort.batches(seconds, slowness).sum()) / seconds


def levels(cohort: Cohort, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 4, cohort.size)


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
def test_nobody_takes_longer_than_the_step_and_nobody_could_do_more(cohort: Cohort, seed: int) -> None:
    slowness = levels(cohort, seed)
    seconds = cohort.step_seconds(slowness)
    batches = cohort.batches(seconds, slowness)
    assert np.all(cohort.times(batches, slowness) <= seconds * (1 + 1e-9))
    assert np.all((batches == 0) | (batches >= LEAST_BATCH)) and np.all(batches <= cohort.caps)
    more = np.where(batches > 0, batches + 1, LEAST_BATCH)
    could = (more <= cohort.caps) & (cohort.times(more, slowness) < seconds * (1 - 1e-9))
    assert not could.any()


@given(crews(), some.integers(0, 2**32), some.floats(0, 1), some.integers(0, 2**12 - 1))
def test_a_fixed_global_batch_is_met_exactly(cohort: Cohort, seed: int, part: float, absent: int) -> None:
    slowness = levels(cohort, seed)
    slowness[[rank for rank in range(cohort.size) if absent >> rank & 1]] = np.inf
    present = np.isfinite(slowness)
    total = LEAST_BATCH + int(part * (int(cohort.caps.sum()) - LEAST_BATCH))
    if cohort.nearest(total, present) != total:
        with pytest.raises(ValueError, match="possible"):
            cohort.batches_of(total, slowness)
        total = cohort.nearest(total, present)
    if total:
        batches = cohort.batches_of(total, slowness)
        assert batches.sum() == total and not batches[~present].any()
        assert np.all((batches == 0) | (batches >= LEAST_BATCH)) and np.all(batches <= cohort.caps)


def test_an_odd_global_batch_is_one_of_three_and_twos() -> None:
    cohort = Cohort([WorkerKind(DEVICE, 2), WorkerKind(DEVICE, 5)], [0, 0, 0, 1])
    assert cohort.batches_of(5, np.array([1.0, 2.0, 3.0, 9.0])).tolist() == [2, 0, 0, 3]
    assert cohort.batches_of(3, np.array([1.0, 2.0, 3.0, 0.1])).tolist() == [0, 0, 0, 3]
    assert cohort.nearest(5, np.array([True, True, True, False])) == 4


@given(crews(), some.integers(0, 2**32), some.integers(0, 2**12 - 1))
def test_who_is_absent_might_as_well_not_be_in_the_crew(cohort: Cohort, seed: int, absent: int) -> None:
    slowness = levels(cohort, seed)
    there = [rank for rank in range(cohort.size) if not absent >> rank & 1]
    alone = Cohort(cohort.kinds, cohort.members[there])
    with_absent = np.full(cohort.size, np.inf)
    with_absent[there] = slowness[there]
    seconds = cohort.step_seconds(with_absent)
    assert seconds == alone.step_seconds(slowness[there])
    batches = cohort.batches(seconds, with_absent)
    assert batches[there].tolist() == alone.batches(seconds, slowness[there]).tolist()
    assert batches.sum() == batches[there].sum()


def test_the_most_influential_kind_sets_the_step() -> None:
    few, many = (host_and(count) for count in (1, 36))
    assert few.step_seconds(np.ones(2)) == pytest.approx(5.39)
    assert many.step_seconds(np.ones(37)) == pytest.approx(5.4)
    assert many.batches(5.4, np.ones(37)).tolist() == [180] + 36 * [15]


@given(crews(), some.integers(0, 2**32))
def test_no_other_time_that_somebody_takes_for_its_cap_is_worth_it(cohort: Cohort, seed: int) -> None:
    cohort = Cohort(cohort.kinds, cohort.members[: QUANTILES + 1])
    slowness = levels(cohort, seed)
    chosen = cohort.step_seconds(slowness)
    caps = np.maximum(cohort.times(cohort.caps, slowness), SHORTEST)
    best = max(speed(cohort, float(seconds), slowness) for seconds in caps)
    assert best < WORTH_IT * (1 + 1e-9) * speed(cohort, chosen, slowness)


def test_a_large_kind_is_tried_by_few_of_it() -> None:
    cohort = host_and(5000)
    for seed in range(5):
        slowness = levels(cohort, seed)
        caps = np.unique(cohort.times(cohort.caps, slowness))[::50]
        best = max(speed(cohort, float(seconds), slowness) for seconds in caps)
        assert speed(cohort, cohort.step_seconds(slowness), slowness) > 0.98 * best


def test_who_has_no_memory_for_two_samples_sets_no_step() -> None:
    cohort = Cohort([WorkerKind(HOST, 1), WorkerKind(DEVICE, 999)], [0, 0, 1])
    seconds = cohort.step_seconds(np.ones(3))
    assert seconds == pytest.approx(5.4) and cohort.batches(seconds, np.ones(3)).tolist() == [0, 0, 15]
    assert Cohort([WorkerKind(HOST, 1)], [0]).step_seconds(np.ones(1)) == 0


@pytest.mark.parametrize("busy", [None, 0.0, 0.5])
def test_ten_thousand_quiet_steps_change_nothing(busy: float | None) -> None:
    noise = np.random.default_rng(1)
    controller = BalanceController(Cohort([WorkerKind(HOST, 999), WorkerKind(DEVICE, 999)], [0] + 36 * [1]))
    before = controller.plan
    for _ in range(10_000):
        told = None if busy is None else np.clip(noise.normal(busy, 0.05, 37), 0, 1)
        took = before.times * np.maximum(noise.normal(1, 0.1, 37), 0.5)
        assert not controller.observe(before.batches, took, told)
    assert controller.plan is before


@pytest.mark.parametrize(("speed", "gone", "back"), [(0.25, 1, 3), (0.57, 2, 4), (0.81, 10, 16)])
def test_a_slowdown_is_found_and_so_is_power_that_comes_back(speed: float, gone: int, back: int) -> None:
    noise = np.random.default_rng(2)
    controller = BalanceController(Cohort([WorkerKind(DEVICE, 999)], [0, 0, 0]))
    normal = controller.plan.batches.copy()
    for real, most in ((np.array([1.0, 1.0, 1 / speed]), gone), (np.ones(3), back)):
        found = []
        for step in range(1, 80):
            took = controller.cohort.times(controller.plan.batches, real) * noise.normal(1, 0.03, 3)
            if controller.observe(controller.plan.batches, took):
                found.append(step)
        assert found[0] <= most
        assert controller.slowness == pytest.approx(real, rel=0.05)
    assert np.all(np.abs(controller.plan.batches - normal) <= 1)


def test_who_was_not_measured_is_not_judged() -> None:
    slowness = Slowness(np.ones(2))
    for _ in range(100):
        assert not slowness.observe(np.array([1.0, 1.0]), np.array([1.0, math.nan])).size
    assert slowness.level.tolist() == [1.0, 1.0]


class Device:
    """One of two equal workers, and what a controller makes of it."""

    def __init__(self, total: int | None = None) -> None:
        self.noise = np.random.default_rng(3)
        self.controller = BalanceController(Cohort([WorkerKind(DEVICE, 999)], [0, 0, 0]), total=total)

    @property
    def batch(self) -> int:
        return int(self.controller.plan.batches[2])

    def step(self, slowness: float, busy: float | None) -> bool:
        batches = self.controller.plan.batches
        took = self.controller.cohort.times(batches, np.array([1.0, 1.0, slowness])) * self.noise.normal(
            1, 0.03, 3
        )
        told = np.array([0.0, 0.0, np.nan if busy is None else busy]) + self.noise.normal(0, 0.03, 3)
        return self.controller.observe(batches, np.where(batches > 0, took, np.nan), np.clip(told, 0, 1))

    def steps(self, count: int, slowness: float, busy: float | None) -> int:
        """How many of them brought a new plan."""
        return sum(self.step(slowness, busy) for _ in range(count))


def test_time_and_load_that_agree_are_believed_at_once() -> None:
    device = Device()
    assert not device.steps(20, 1.0, 0.1)
    assert device.step(1.6, 0.45) and device.controller.slowness[2] == pytest.approx(1.6, rel=0.1)
    device.steps(40, 1.6, 0.45)
    assert device.step(1.0, 0.1) and device.controller.slowness[2] == pytest.approx(1.0, rel=0.1)


def test_time_and_load_that_disagree_are_left_to_the_filter() -> None:
    device = Device()
    assert not device.steps(20, 1.0, 0.1)
    assert not device.steps(50, 1.0, 0.6)  # another core's load
    assert not device.step(1.6, 0.6) and device.steps(2, 1.6, 0.6)
    assert not device.step(1.6, 0.1) and device.controller.slowness[2] == pytest.approx(1.6, rel=0.1)


def test_who_sits_out_comes_back_when_its_load_is_gone() -> None:
    device = Device()
    device.steps(20, 1.0, 0.0)
    device.steps(20, 8.0, 0.875)
    assert device.batch == 0
    assert not device.steps(10 * PROBE, 8.0, 0.875)  # explained: no probe
    assert device.step(1.0, 0.0) and device.batch >= 12
    device.steps(40, 1.0, 0.0)
    assert device.controller.slowness[2] == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("busy", [None, 0.0])
@pytest.mark.parametrize("total", [None, 20])
def test_who_sits_out_for_no_known_reason_is_probed(busy: float | None, total: int | None) -> None:
    device = Device(total)
    device.steps(20, 30.0, busy)
    assert device.batch == 0
    batches, sums = [], set()
    deadline = device.controller.plan.deadline
    for _ in range(3 * PROBE):
        device.step(30.0, busy)
        batches.append(device.batch)
        sums.add(int(device.controller.plan.batches.sum()))
        assert device.controller.plan.deadline == deadline
    assert sorted(batches)[-4:] == [0, 2, 2, 2] and (total is None or sums == {total})
    device.steps(PROBE + 2, 1.0, busy)
    assert device.batch > 2


def test_members_leave_and_come_back() -> None:
    cohort = Cohort([WorkerKind(HOST, 999), WorkerKind(DEVICE, 999)], [0, 1, 1])
    controller = BalanceController(cohort, levels=np.array([1.0, 1.0, 2.0]))
    whole = controller.plan
    assert controller.slowness.tolist() == [1, 1, 2] and whole.batches[1] > whole.batches[2] > 0
    without = controller.leave(0)
    assert without.batches[0] == 0 and without.times.max() <= 2 * 5.4 and controller.plan is without
    done = np.array([180, *without.batches[1:]])
    for _ in range(50):
        assert not controller.observe(done, np.array([99.0, *without.times[1:]]), np.array([0.9, 0, 0]))
    assert controller.join(0).batches.tolist() == whole.batches.tolist()
    controller.leave(2)
    back = controller.join(2)
    assert back.batches[2] == back.batches[1] >= whole.batches[1]
    controller.leave(2)
    assert controller.join(2, 2.0).batches[2] == whole.batches[2]
    for rank in range(3):
        nobody = controller.leave(rank)
    assert nobody.batches.tolist() == [0, 0, 0]


def test_a_fixed_global_batch_is_as_near_as_those_present_can_come() -> None:
    cohort = Cohort([WorkerKind(DEVICE, 15)], [0, 0, 0])
    controller = BalanceController(cohort, total=40, present=np.array([True, True, False]))
    assert controller.plan.batches.tolist() == [15, 15, 0]
    assert controller.join(2).batches.sum() == 40
    assert controller.leave(1).batches.sum() == 30
    with pytest.raises(ValueError, match="2 to 45 are possible"):
        BalanceController(cohort, total=46)


def test_who_has_less_memory_than_its_kind_is_one_of_its_own() -> None:
    points = ((2, 1.2), (5, 2.2), (15, 5.4))
    members = [Measured("csd", points, most) for most in (20, 8, 0, 30)]
    kinds, numbers, levels = kinds_of(members)
    assert numbers == [0, 1, 2, 0] and [kind.cap for kind in kinds] == [15, 8, 0]
    assert levels == [1.0] * 4 and len({kind.curve for kind in kinds}) == 1


def test_members_of_a_kind_make_its_curve_and_have_their_levels() -> None:
    points = ((2, 1.2), (5, 2.2), (15, 5.4))
    members = [
        Measured("csd", [(batch, factor * seconds) for batch, seconds in points], most)
        for factor, most in ((1.0, 20), (1.04, 30), (0.5, 25), (1.02, 30), (3.0, 20))
    ]
    kinds, numbers, found = kinds_of([Measured("host", [(20, 0.9), (60, 2.0)], 999), *members])
    assert numbers == [0, 1, 1, 1, 1, 1] and [kind.cap for kind in kinds] == [60, 15]
    assert kinds[0].curve == Curve((20, 60), (0.9, 2.0))
    assert np.allclose(kinds[1].curve.seconds, [1.02 * seconds for _, seconds in points])
    assert found == pytest.approx([1.0, 1.0, 1.0, 0.5 / 1.02, 1.0, 3.0 / 1.02])
    assert found[0] == found[1] == found[2] == found[4] == 1.0


def test_a_kind_has_all_batches_at_which_one_of_it_was_measured() -> None:
    kinds, _, found = kinds_of(
        [Measured("a", [(2, 1.0), (4, 2.0)], 9), Measured("a", [(2, 1.0), (8, 4.0)], 9)]
    )
    assert kinds[0].curve == Curve((2, 4, 8), (1.0, 2.0, 4.0)) and found == [1.0, 1.0]
