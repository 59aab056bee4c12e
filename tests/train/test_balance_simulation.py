# SPDX-License-Identifier: Apache-2.0
"""The simulated fleet under each policy, with workers that join and leave, and the policies' results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from millpond.train.balance.controller import BalanceController
from millpond.train.balance.curve import Curve
from millpond.train.balance.equal_time import Cohort, WorkerKind
from millpond.train.balance.hypertune import THRESHOLD, as_printed, between_pairs, decline_index, inverse
from millpond.train.balance.policy import Elastic, PolicyName, Untuned, policy_of
from millpond.train.balance.simulation import BatchPolicy, SimulatedLoads, SimulationOutcome, simulate
from millpond.train.balance.stannis import Stannis

HOST = Curve((20, 60, 180), (0.9, 2.0, 5.39))
DEVICE = Curve((2, 5, 15), (1.2, 2.2, 5.4))
QUIET = SimulatedLoads(busy=0.0, noise=0.0)


STEADY = Curve((2, 10), (1.2, 5.2))  # 0.2 s, and 0.5 s for each sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(SimulatedLoads):
    """How slow each is: at first, and after the first step."""

    first: tuple[float, ...]
    then: tuple[float, ...]
    noise: float = 0.0
    busy_noise: float = 0.0

    def begin(self, size: int, source: np.random.Generator) -> np.ndarray:
        return np.array(self.first)

    def change(self, slowness: np.ndarray, source: np.random.Generator) -> np.ndarray:
        return np.array(self.then)


class Hearing(Untuned):
    """Writes down what it is told: batches, seconds, and what other work takes of the processors."""

    def __init__(self, cohort: Cohort, **more: Any) -> None:
        super().__init__(cohort, **more)
        self.told: list[tuple[list[float], ...]] = []

    def observe(self, batches: Any, measured: Any, busy: Any = None, left: float = 1.0, /) -> bool:
        self.told.append(tuple(np.round(values, 9).tolist() for values in (batches, measured, busy)))
        return False


def fleet(devices: int) -> Cohort:
    return Cohort([WorkerKind(HOST, 999), WorkerKind(DEVICE, 999)], [0] + devices * [1])


def test_a_quiet_fleet_reaches_its_ideal() -> None:
    cohort = fleet(36)
    policies: tuple[BatchPolicy, ...] = (Untuned(cohort), Stannis(cohort), BalanceController(cohort))
    for policy in policies:
        outcome = simulate(cohort, policy, QUIET, 50, 1)
        assert outcome.share == pytest.approx(1, abs=0.002) and outcome.bias == 0 and outcome.new_plans == 0
        assert outcome.speed == pytest.approx(33.4 + 36 * 2.78, rel=0.01)


def test_an_exchange_between_hosts_takes_its_part_of_the_time() -> None:
    cohort = fleet(36)
    alone = simulate(cohort, Untuned(cohort), QUIET, 50, 1)
    found = simulate(cohort, Untuned(cohort), QUIET, 50, 1, exchange=alone.seconds / 50)
    assert alone.communication == 0 and found.communication == pytest.approx(0.5)
    assert found.speed == pytest.approx(alone.speed / 2) and found.share == pytest.approx(alone.share / 2)


def test_late_workers_are_done_during_an_exchange() -> None:
    cohort = fleet(36)
    found = simulate(cohort, BalanceController(cohort), SimulatedLoads(), 100, 1, exchange=3.0)
    assert found.bias < 0.02 and 0.5 < found.share + found.communication <= 1


def test_the_same_seed_gives_the_same_fleet() -> None:
    def once(seed: int) -> SimulationOutcome:
        cohort = fleet(5)
        return simulate(cohort, BalanceController(cohort), SimulatedLoads(), 100, seed)

    assert once(1).seconds == once(1).seconds and np.array_equal(once(1).counted, once(1).counted)
    assert once(1).seconds != once(2).seconds


def test_busy_devices_cost_little_under_the_controller_and_much_without() -> None:
    cohort = fleet(36)
    policies: tuple[BatchPolicy, ...] = (Untuned(cohort), BalanceController(cohort))
    shares = [simulate(cohort, policy, SimulatedLoads(), 400, 1).share for policy in policies]
    assert shares[0] < 0.5 and shares[1] > 0.85


@pytest.mark.parametrize("devices", [36, 1000])
def test_late_sums_are_carried_over_so_that_nobody_counts_too_little(devices: int) -> None:
    cohort = fleet(devices)
    carried = simulate(cohort, BalanceController(cohort), SimulatedLoads(), 400, 1)
    assert carried.bias < 0.01
    assert np.all(carried.counted <= carried.begun)


def test_who_is_late_begins_again_with_a_part_and_is_heard_of_twice() -> None:
    cohort = Cohort([WorkerKind(STEADY, 10)], [0, 0])
    policy = Hearing(cohort, patience=1.1)
    loads = Schedule(first=(1.0, 1.5), then=(1.0, 1.0))
    outcome = simulate(cohort, policy, loads, 2, 1)
    assert outcome.seconds == pytest.approx(1.1 * 5.2 + 5.2)
    assert outcome.counted.tolist() == [20, 10 + 5] and outcome.bias == 0  # 5 in 0.6 of the second step
    nothing, third = math.nan, round(1 / 3, 9)
    expected = [
        ([10, 0], [5.2, nothing], [0, nothing]),
        ([0, 10], [nothing, 7.8], [0, third]),
        ([10, 5], [5.2, 2.7], [0, 0]),
    ]
    assert len(policy.told) == 3
    for told, wanted in zip(policy.told, expected, strict=True):
        for values, others in zip(told, wanted, strict=True):
            assert values == pytest.approx(others, nan_ok=True)


def test_who_has_no_time_for_a_part_begins_with_the_next_step() -> None:
    cohort = Cohort([WorkerKind(STEADY, 10)], [0, 0])
    loads = Schedule(first=(1.0, 2.0), then=(1.0, 1.0))
    outcome = simulate(cohort, Untuned(cohort, patience=1.1), loads, 3, 1)
    assert outcome.counted.tolist() == [30, 20] and outcome.seconds == pytest.approx(1.1 * 5.2 + 2 * 5.2)


@pytest.mark.parametrize(("steps", "counted"), [(5, 0), (6, 6), (11, 6), (12, 12)])
def test_who_sits_out_has_a_batch_that_nobody_waits_for(steps: int, counted: int) -> None:
    cohort, slowness = Cohort([WorkerKind(STEADY, 10)], [0, 0, 0]), (1.0, 1.0, 9.0)
    policy = Untuned(cohort, patience=1.1, levels=np.array(slowness))
    assert policy.plan.batches.tolist() == [10, 10, 0]
    outcome = simulate(cohort, policy, Schedule(first=slowness, then=slowness), steps, 1)  # 28.8 s for 6
    assert outcome.counted.tolist() == [10 * steps, 10 * steps, counted]
    assert outcome.seconds == pytest.approx(5.2 * steps)


def test_where_all_sit_out_a_step_ends_with_the_first_answer() -> None:
    cohort = Cohort([WorkerKind(STEADY, 10)], [0, 0])
    policy = Untuned(cohort, patience=1.1, present=np.zeros(2, dtype=np.bool_))
    outcome = simulate(cohort, policy, Schedule(first=(1.0, 3.5), then=(1.0, 3.5)), 4, 1)
    assert outcome.seconds == pytest.approx(3.5 * 1.2) and outcome.counted.tolist() == [6, 2]


def test_loads_keep_their_part_of_the_time() -> None:
    loads, source = SimulatedLoads(busy=0.2, lasting=50), np.random.default_rng(3)
    slowness = loads.begin(2000, source)
    parts = []
    for _ in range(300):
        parts.append(float((slowness > 1).mean()))
        slowness = loads.change(slowness, source)
    assert np.mean(parts) == pytest.approx(0.2, abs=0.02)
    assert slowness.max() <= loads.most and slowness[slowness > 1].min() >= loads.least


def test_what_devices_tell_of_their_load_is_true_up_to_noise() -> None:
    slowness = np.repeat([1.0, 2.0, 4.0], 2000)
    told = SimulatedLoads(busy_noise=0.05).reported(slowness, np.random.default_rng(1)).reshape(3, 2000)
    assert told.mean(axis=1) == pytest.approx([0.02, 0.5, 0.75], abs=0.005)  # nothing is below 0
    assert told[1:].std(axis=1) == pytest.approx([0.05, 0.05], rel=0.1) and told.min() == 0
    assert np.array_equal(
        SimulatedLoads(busy_noise=0).reported(slowness, np.random.default_rng(1)), 1 - 1 / slowness
    )


# Section V-A of the Stannis paper: three nodes make 93.4 img/s at a batch of 180; untuned they make 75.6 and
# 53.3 with 4 and 6 of 8 cores of one taken.
PAPER_SPEED = 93.4 / 3
_BATCHES = (20, 60, 100, 180)
FLAT = Curve(_BATCHES, tuple(0.19 + (180 / PAPER_SPEED - 0.19) * batch / 180 for batch in _BATCHES))
"""Smaller batches take less time, as in the paper's figures; at 100 it has 0.97 of its speed."""


def steps(
    policy: Elastic, cohort: Cohort, slowness: float, count: int, left: float = 0.5, tells: bool = True
) -> list[int]:
    """The last worker is so slow; return its batch after each step."""
    found = []
    for _ in range(count):
        real = np.ones(cohort.size)
        real[-1] = slowness
        batches = policy.plan.batches
        busy = 1 - 1 / real if tells else np.full(cohort.size, np.nan)
        policy.observe(batches, cohort.times(batches, real), busy, left)
        found.append(int(policy.plan.batches[-1]))
    return found


def test_the_decline_index_is_that_of_the_paper() -> None:
    speeds = np.array([93.4, 75.6, 53.3])
    normal = np.full(3, 93.4)
    assert decline_index(normal, speeds, 0.0) == pytest.approx([0, 0.133, 0.301], abs=5e-4)
    assert decline_index(normal, speeds, 0.5) == pytest.approx([0.15, 0.283, 0.451], abs=5e-4)
    assert decline_index(normal[:1], speeds[:1], 0.67) > THRESHOLD  # without any slowdown


@pytest.mark.parametrize(("left", "fires"), [(0.5, True), (0.24, True), (0.2, False)])
def test_the_half_loaded_case_is_flagged_until_late_in_the_epoch(left: float, fires: bool) -> None:
    cohort = Cohort([WorkerKind(FLAT, 999)], [0, 0, 0])
    found = steps(Stannis(cohort), cohort, 93.4 / 75.6, 5, left)
    assert (found[-1] < 180) is fires and found[:4] == 4 * [180]


def test_equation_3_goes_through_the_measured_pairs_only_with_its_weights_exchanged() -> None:
    pairs = [(batch, batch / seconds) for batch, seconds in zip(FLAT.batches, FLAT.seconds, strict=True)]
    assert [between_pairs(FLAT, speed) for _, speed in pairs] == pytest.approx([20, 60, 100, 180])
    assert [as_printed(FLAT, speed) for _, speed in pairs[:-1]] == pytest.approx([60, 100, 180])
    assert between_pairs(FLAT, (pairs[0][1] + pairs[1][1]) / 2) == pytest.approx(40)
    assert [between_pairs(FLAT, speed) for speed in (1.0, 99.0)] == [20, 180]


@given(some.floats(1.0, 40.0))
def test_equation_3_as_printed_mirrors_the_line_between_two_pairs(speed: float) -> None:
    own, printed = between_pairs(FLAT, speed), as_printed(FLAT, speed)
    if FLAT.batches[0] < own < FLAT.batches[-1]:
        low = max(batch for batch in FLAT.batches if batch <= own)
        high = min(batch for batch in FLAT.batches if batch > low)
        assert own + printed == pytest.approx(low + high)


@pytest.mark.parametrize(("load", "batch"), [(75.6, 140), (53.3, 100)])
def test_the_batches_of_the_paper_follow_from_a_curve_whose_speed_is_proportional(
    load: float, batch: int
) -> None:
    """The paper's 140 and 100 are what equation 3 gives if these batches have those speeds on an idle node.
    But then 100 samples take no less time than 140 or 180: a smaller batch helps nothing.
    """
    speeds = {100: 53.3 / 3, 140: 75.6 / 3, 180: PAPER_SPEED}
    curve = Curve.fit((one, one / speed) for one, speed in speeds.items())
    assert curve.seconds == pytest.approx(3 * [5.7], rel=0.03)
    cohort = Cohort([WorkerKind(curve, 999)], [0, 0, 0])
    assert steps(Stannis(cohort), cohort, 93.4 / load, 5)[-1] == pytest.approx(batch, rel=0.03)


def test_a_lasting_slowdown_makes_the_batch_smaller_until_the_smallest_pair() -> None:
    cohort = Cohort([WorkerKind(FLAT, 999)], [0, 0, 0])
    found = steps(Stannis(cohort), cohort, 93.4 / 75.6, 20)
    assert found[:4] == 4 * [180] and found[4:9] == 5 * [found[4]] and 20 < found[4] < 60
    assert found[9:] == 11 * [20]


def test_a_worker_at_its_normal_speed_keeps_its_batch_though_it_is_flagged() -> None:
    for name in ("stannis", "stannis-inverse", "stannis-cpu"):
        cohort = Cohort([WorkerKind(FLAT, 999)], [0, 0, 0])
        assert set(steps(policy_of(name, cohort, None, None), cohort, 1.0, 20, left=1.0)) == {180}


@pytest.mark.parametrize("name", ["stannis", "stannis-inverse"])
def test_the_methods_that_go_by_the_speed_never_give_a_batch_back(name: PolicyName) -> None:
    cohort = Cohort([WorkerKind(FLAT, 999)], [0, 0, 0])
    policy = policy_of(name, cohort, None, None)
    smaller = steps(policy, cohort, 2.0, 20)[-1]
    assert smaller < 180 and set(steps(policy, cohort, 1.0, 20)) == {smaller}
    assert policy.plan.batches.tolist() == [180, 180, smaller] and policy.plan.deadline == math.inf


@pytest.mark.parametrize(("load", "batch"), [(75.6, 145), (53.3, 102)])
def test_the_third_method_follows_the_usage_rests_and_gives_the_batch_back(load: float, batch: int) -> None:
    cohort = Cohort([WorkerKind(FLAT, 999)], [0, 0, 0])
    policy = policy_of("stannis-cpu", cohort, None, None)
    assert set(steps(policy, cohort, 1.0, 3)) == {180}
    found = steps(policy, cohort, 93.4 / load, 30)
    assert found[3] == 180 and set(found[5:]) == {batch}
    assert steps(policy, cohort, 1.0, 8)[-1] == 180


def test_the_third_method_leaves_a_worker_whose_usage_is_unknown() -> None:
    cohort = Cohort([WorkerKind(FLAT, 999)], [0, 0, 0])
    policy = policy_of("stannis-cpu", cohort, None, None)
    assert set(steps(policy, cohort, 3.0, 20, tells=False)) == {180}
    smaller = [*steps(policy, cohort, 1.0, 5), *steps(policy, cohort, 3.0, 20)][-1]
    assert smaller == 60 and set(steps(policy, cohort, 3.0, 20, tells=False)) == {smaller}


def test_the_first_method_inverts_the_fitted_curve() -> None:
    assert inverse(STEADY, 10 / 5.2) == 10 and inverse(STEADY, 0.1) == 2
    expected = math.floor(0.2 * 1.5 / (1 - 0.5 * 1.5))  # b / (0.2 + 0.5 b) is the speed
    assert inverse(STEADY, 1.5) == max(2, expected)


def test_the_rule_of_the_paper_counts_steps_in_which_a_worker_took_part() -> None:
    cohort = Cohort([WorkerKind(STEADY, 10)], [0, 0])
    policy = Stannis(cohort)
    batches = policy.plan.batches
    took = cohort.times(batches, np.array([1.0, 3.0]))
    for _ in range(4):
        assert not policy.observe(batches, took)
        assert not policy.observe(batches, np.array([5.2, math.nan]))
    assert policy.observe(batches, took)


CREW = Cohort([WorkerKind(DEVICE, 999)], [0, 0, 0])
NAMES: tuple[PolicyName, ...] = get_args(PolicyName)


@pytest.mark.parametrize("name", NAMES)
def test_all_begin_with_the_same_batches(name: PolicyName) -> None:
    levels = np.array([1.0, 1.0, 2.0])
    plans = [policy_of(other, CREW, 30, None, levels=levels).plan for other in ("balance", name)]
    assert plans[0].batches.tolist() == plans[1].batches.tolist() and plans[1].batches.sum() == 30
    assert np.array_equal(plans[0].times, plans[1].times) and plans[1].deadline == math.inf
    with pytest.raises(ValueError, match="possible"):
        policy_of(name, CREW, 1000, None)


@pytest.mark.parametrize("name", NAMES)
def test_who_leaves_has_no_batch_until_it_joins(name: PolicyName) -> None:
    policy = policy_of(name, CREW, None, None, present=np.array([True, True, False]))
    assert (policy.plan.batches > 0).tolist() == [True, True, False]
    assert policy.leave(0).batches.tolist() == [0, 15, 0] and policy.plan.times[0] == 0
    assert policy.join(2).batches.tolist() == [0, 15, 15]
    assert policy.join(0, 2.0) is policy.plan and policy.slowness.tolist() == [2, 1, 1]
    assert (policy.plan.batches[0] < 15) == (name == "balance")


def test_only_the_controller_has_patience_with_a_slow_worker() -> None:
    deadlines = {name: policy_of(name, CREW, None, 1.5).plan.deadline for name in NAMES}
    patient = {"balance": 8.1, "fixed": 8.1}
    assert deadlines == pytest.approx({name: patient.get(name, math.inf) for name in NAMES})
