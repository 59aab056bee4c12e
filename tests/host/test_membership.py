# SPDX-License-Identifier: Apache-2.0
"""The membership of a job: joined, lost, banned with a cool-down, out; and what is enough of them."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.host.jobs.training.membership import (
    BAN_SECONDS,
    LONGEST_BAN_SECONDS,
    LOSSES,
    Membership,
    MemberState,
)
from millpond.host.jobs.training.round_planner import FIRST_DEADLINE, RoundPlanner, selected

HOST = 0


def team(devices: int = 4, quorum: float = 0.5) -> Membership[str]:
    """A host, and some devices."""
    return Membership[str](devices + 1, range(1, devices + 1), quorum)


def test_a_lost_worker_may_come_back_at_once_and_often_later() -> None:
    made = team()
    made.join(1, "csd0")
    pauses = []
    for _ in range(LOSSES + 6):
        pauses.append(made.lose(1, 100.0, for_good=False))
        assert 1 not in made.joined
        made.join(1, "csd0")
    doubled = [min(BAN_SECONDS * 2**n, LONGEST_BAN_SECONDS) for n in range(7)]
    assert pauses == [0.0] * (LOSSES - 1) + doubled


def test_a_ban_ends_by_the_clock_and_a_counted_update_ends_the_row() -> None:
    made = team()
    for _ in range(LOSSES):
        made.join(1, "csd0")
        made.lose(1, 100.0, for_good=False)
    assert made.state(1, 100.0 + BAN_SECONDS - 1) is MemberState.BANNED
    assert made.state(1, 100.0 + BAN_SECONDS) is MemberState.ABSENT
    made.join(1, "csd0")
    assert made.state(1, 0.0) is MemberState.JOINED and made.losses(1) == LOSSES
    made.counted([1])
    assert made.lose(1, 200.0, for_good=False) == 0.0


def test_out_is_for_good_and_without_hope_there_is_none() -> None:
    made = team(devices=2, quorum=1.0)
    assert made.can_reach_quorum
    assert made.lose(1, 0.0, for_good=True) == math.inf
    assert made.state(1, 1e9) is MemberState.OUT
    assert not made.can_reach_quorum


@pytest.mark.parametrize(
    ("devices", "quorum", "needed"),
    [(4, 0.5, 2), (3, 0.5, 2), (3, 0.0, 1), (3, 1.0, 3), (10, 0.3, 3), (0, 1, 1)],
)
def test_the_quorum_is_of_devices_alone(devices: int, quorum: float, needed: int) -> None:
    made = team(devices, quorum)
    assert made.needed == needed
    assert not made.is_quorum([HOST, *range(1, needed)])
    if devices:
        assert made.is_quorum(range(1, needed + 1))


def test_of_chosen_devices_the_quorum_is_a_share_of_these() -> None:
    made = team(10)
    assert made.is_quorum([3], asked=[3, 7]) and not made.is_quorum([], asked=[3, 7])
    assert not made.is_quorum([HOST], asked=[3])


@given(st.integers(1, 300), st.floats(0.0, 1.0), st.integers(1, 5), st.integers(0, 2**32), st.integers(0, 99))
def test_a_selection_has_the_wanted_size_and_can_be_repeated(
    count: int, fraction: float, least: int, seed: int, number: int
) -> None:
    devices = list(range(5, 5 + count))
    chosen = selected(devices, fraction, least, seed, number)
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(devices)
    assert len(chosen) == min(count, max(least, math.ceil(fraction * count - 1e-9)))
    assert chosen == selected(devices, fraction, least, seed, number)


def test_every_device_has_its_turn() -> None:
    turns = [rank for number in range(300) for rank in selected(range(10), 0.2, 1, 1, number)]
    assert all(30 < turns.count(rank) < 90 for rank in range(10))


def test_an_automatic_deadline_follows_the_workers() -> None:
    planner = RoundPlanner([f"csd{rank}" for rank in range(5)], "auto")
    for rank in range(5):
        planner.join(rank, 100)
    assert planner.plan.deadline == FIRST_DEADLINE
    planner.observe(planner.plan.batches, np.array([10.0, 11.0, 12.0, 13.0, 40.0]))
    assert planner.plan.deadline == pytest.approx(24.0)  # twice the median; the spread is 1.4826
    planner.observe(planner.plan.batches, np.array([2.0, 10.0, 12.0, 20.0, math.nan]))
    assert planner.plan.deadline == pytest.approx(12 + 5 * 1.4826 * 8)
    late = np.array([12.0, math.nan, math.nan, math.nan, math.nan])
    planner.observe(planner.plan.batches, late)
    before = planner.plan.deadline
    planner.observe(planner.plan.batches, late)
    assert planner.plan.deadline == pytest.approx(2 * before)
    planner.observe(planner.plan.batches, np.full(5, 0.01))
    assert planner.plan.deadline == 1.0
    planner.choose([0, 1, 2])
    planner.observe(planner.plan.batches, np.array([math.nan, math.nan, math.nan, 0.02, 0.02]))
    assert planner.plan.deadline == 1.0  # those that were not asked have missed nothing


def test_an_automatic_deadline_follows_those_that_missed_it() -> None:
    """Most devices take 400 s: what they took is known, though their answers came too late to count."""
    planner = RoundPlanner(["csd0", "csd1"], "auto")
    for rank in range(2):
        planner.join(rank, 10)
    none = np.zeros(2, np.int64)
    assert planner.deadline == 60
    planner.observe(none, np.array([np.nan, np.nan]))
    assert planner.deadline == 120 and planner.most_late
    planner.observe(none, np.array([400.0, 400.0]))  # late
    assert planner.deadline >= 800 and planner.most_late
    planner.observe(none + 10, np.array([400.0, 400.0]))
    assert planner.deadline == 800 and not planner.most_late


def test_a_deadline_that_most_workers_miss_is_longer_from_then_on() -> None:
    planner = RoundPlanner(["csd0", "csd1"], 60.0)
    for rank in range(2):
        planner.join(rank, 10)
    for counted, deadline in ((0, 120), (0, 240), (10, 240)):
        planner.observe(np.full(2, counted), np.array([100.0, 100.0]))
        assert planner.deadline == deadline


@pytest.mark.parametrize("deadline", [60.0, "auto"])
@pytest.mark.parametrize("buffer", [0, 2])
def test_a_deadline_does_not_grow_without_bound(deadline: float | Literal["auto"], buffer: int) -> None:
    """Most devices have not answered when the few updates of an asynchronous exchange are there."""
    planner = RoundPlanner([f"csd{rank}" for rank in range(8)], deadline, buffer)
    for rank in range(8):
        planner.join(rank, 10)
    longer = 0
    for _ in range(40):
        planner.observe(np.array([10] + [0] * 7), np.array([1.0] + [math.nan] * 7))
        longer += planner.most_late
    assert longer == (0 if buffer else 3) and not planner.most_late
    assert planner.deadline == (60 if buffer else 8 * 60)


def test_a_round_asks_all_samples_of_the_chosen() -> None:
    planner = RoundPlanner(["host", "csd0", "csd1"], 60.0)
    planner.join(0, 270)
    planner.join(1, 569)
    planner.join(2, 337)
    assert planner.plan.batches.tolist() == [270, 569, 337] and planner.plan.deadline == 60.0
    planner.choose([2])
    assert planner.plan.batches.tolist() == [270, 569, 0]
    planner.leave(1)
    assert planner.description == "host 270 samples, csd1 337 samples"
    assert not planner.background.any() and not planner.observe(planner.plan.batches, planner.plan.times)
