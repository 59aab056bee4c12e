"""The simulated fleet: what it must be whatever the policy, and what the policies make of it."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.train.balance.controller import Controller
from millpond.train.balance.curve import Curve
from millpond.train.balance.equal_time import Crew, Kind
from millpond.train.balance.policies import Untuned
from millpond.train.balance.simulation import Loads, Outcome, Policy, simulate
from millpond.train.balance.stannis import Stannis

HOST = Curve((20, 60, 180), (0.9, 2.0, 5.39))
DEVICE = Curve((2, 5, 15), (1.2, 2.2, 5.4))
QUIET = Loads(busy=0.0, noise=0.0)


def fleet(devices: int) -> Crew:
    return Crew([Kind(HOST, 999), Kind(DEVICE, 999)], [0] + devices * [1])


def test_a_quiet_fleet_reaches_its_ideal() -> None:
    crew = fleet(36)
    policies: tuple[Policy, ...] = (Untuned(crew), Stannis(crew), Controller(crew))
    for policy in policies:
        outcome = simulate(crew, policy, QUIET, 50, 1)
        assert outcome.share == pytest.approx(1, abs=0.002) and outcome.bias == 0 and outcome.new_plans == 0
        assert outcome.speed == pytest.approx(33.4 + 36 * 2.78, rel=0.01)


def test_the_same_seed_gives_the_same_fleet() -> None:
    def once(seed: int) -> Outcome:
        crew = fleet(5)
        return simulate(crew, Controller(crew), Loads(), 100, seed)

    assert once(1).seconds == once(1).seconds and np.array_equal(once(1).counted, once(1).counted)
    assert once(1).seconds != once(2).seconds


def test_busy_devices_cost_little_under_the_controller_and_much_without() -> None:
    crew = fleet(36)
    policies: tuple[Policy, ...] = (Untuned(crew), Controller(crew))
    shares = [simulate(crew, policy, Loads(), 400, 1).share for policy in policies]
    assert shares[0] < 0.5 and shares[1] > 0.85


@pytest.mark.parametrize("devices", [36, 1000])
def test_late_sums_are_carried_over_so_that_nobody_counts_too_little(devices: int) -> None:
    crew = fleet(devices)
    carried = simulate(crew, Controller(crew), Loads(), 400, 1)
    dropped = simulate(crew, Controller(crew), Loads(), 400, 1, carry=False)
    assert carried.bias < 0.01
    assert dropped.bias > 5 * carried.bias
    assert np.all(carried.counted <= carried.begun)


def test_loads_keep_their_part_of_the_time() -> None:
    loads, source = Loads(busy=0.2, lasting=50), np.random.default_rng(3)
    slowness = loads.begin(2000, source)
    parts = []
    for _ in range(300):
        parts.append(float((slowness > 1).mean()))
        slowness = loads.change(slowness, source)
    assert np.mean(parts) == pytest.approx(0.2, abs=0.02)
    assert slowness.max() <= loads.most and slowness[slowness > 1].min() >= loads.least


def test_what_devices_tell_of_their_load_is_true_up_to_noise() -> None:
    slowness = np.repeat([1.0, 2.0, 4.0], 2000)
    told = Loads(busy_noise=0.05).told(slowness, np.random.default_rng(1)).reshape(3, 2000)
    assert told.mean(axis=1) == pytest.approx([0.02, 0.5, 0.75], abs=0.005)  # nothing is below 0
    assert told[1:].std(axis=1) == pytest.approx([0.05, 0.05], rel=0.1) and told.min() == 0
    assert np.array_equal(Loads(busy_noise=0).told(slowness, np.random.default_rng(1)), 1 - 1 / slowness)


def test_devices_that_sit_out_come_back_with_their_power() -> None:
    crew = fleet(36)
    loads = Loads(least=6.0, most=9.0)
    told = simulate(crew, Controller(crew), loads, 400, 1)
    assert told.share > 0.85 and told.bias < 0.01
    quiet = simulate(crew, Controller(crew), Loads(least=6.0, most=9.0, busy_noise=9.0), 400, 1)
    assert quiet.share < told.share


def test_the_rule_of_the_paper_never_gives_a_batch_back() -> None:
    crew = Crew([Kind(DEVICE, 999)], [0, 0, 0])
    policy = Stannis(crew)
    normal = policy.plan.batches.copy()
    for step in range(40):
        real = np.array([1.0, 1.0, 2.0 if step < 20 else 1.0])
        changed = policy.observe(policy.plan.batches, crew.times(policy.plan.batches, real))
        assert changed == (step == 4) or step > 4
    assert policy.plan.batches[2] < normal[2] and np.array_equal(policy.plan.batches[:2], normal[:2])
