# SPDX-License-Identifier: Apache-2.0
"""The plan of the present workers, through joins and losses: known speeds stay; the log line is true."""

from __future__ import annotations

import re
from itertools import permutations
from typing import get_args

import numpy as np
import pytest

from millpond.host.jobs.training.planner import Planner
from millpond.host.jobs.training.shards import Shard, Shards
from millpond.train.balance.curve import Ints
from millpond.train.balance.policy import PolicyName
from millpond.train.balance.profiling import Point, Profile
from millpond.train.job.spec import SynchronousSpec

NAMES = ("host", "csd0", "csd1", "csd2")
PLENTY = 1 << 30
WITHOUT_LOAD = np.full(4, np.nan)


def profile(name: str, per_sample: float, fixed: float = 0.01, kind: str = "") -> Profile:
    """Linear times up to a batch of 64, which is the fastest."""
    batches = (2, 4, 8, 16, 32, 64)
    return Profile(name, kind or name, tuple(Point(b, fixed + per_sample * b, 1000 * b) for b in batches))


HOST = profile("host", 0.002)
DEVICES = [profile(name, 0.01, kind="csd") for name in NAMES[1:]]


def shards_of(samples: int, *, public: bool = False) -> Shards:
    """The shards of workers with so many samples of their own each, or of all."""
    shards = Shards(4)
    shards.begin(1)
    for rank, name in enumerate(NAMES):
        shards.add(rank, [Shard("all" if public else name, public, samples)])
    return shards


def planner(
    spec: SynchronousSpec | None = None,
    *,
    there: int = 4,
    shards: Shards | None = None,
    samples: int = PLENTY,
    last: Profile | None = None,
) -> Planner:
    made = Planner(spec or SynchronousSpec(), NAMES, shards.spread if shards else None)
    for rank, measured in enumerate([HOST, *DEVICES[:2], last or DEVICES[2]][:there]):
        made.join(rank, measured, PLENTY, samples)
    return made


def observe(made: Planner, slowness: dict[int, float], steps: int = 5) -> None:
    """Steps in which workers take so many times as long as planned at first."""
    for _ in range(steps):
        batches = made.plan.batches
        seconds = np.full(4, np.nan)
        for rank, measured in enumerate([HOST, *DEVICES]):
            if batches[rank]:
                first, second = measured.points[:2]
                slope = (second.seconds - first.seconds) / (second.batch - first.batch)
                took = first.seconds + slope * (int(batches[rank]) - first.batch)
                seconds[rank] = slowness.get(rank, 1.0) * took
        made.observe(batches, seconds, WITHOUT_LOAD)


def planned(made: Planner) -> list[int]:
    batches: list[int] = made.plan.batches.tolist()
    return batches


def test_nobody_has_a_batch_while_nobody_is_there() -> None:
    nobody = Planner(SynchronousSpec(), NAMES)
    assert planned(nobody) == [0, 0, 0, 0] and nobody.plan.deadline == 0
    assert not nobody.background.any()
    assert not nobody.observe(np.zeros(4, np.int64), np.full(4, np.nan))
    assert nobody.description == "nobody has time for two samples"
    nobody.leave(1)


def test_all_take_as_long() -> None:
    made = planner()
    times = made.plan.times
    assert planned(made)[1:] == 3 * [planned(made)[1]]
    assert planned(made)[0] > 2 * planned(made)[1] > 2
    slope = 0.01  # of a device for one sample more
    assert float(times.max() - times.min()) <= slope
    assert made.plan.deadline == pytest.approx(max(1.1 * times.max(), times.max() + 0.1))


def test_the_order_is_of_no_matter_though_devices_of_a_kind_differ() -> None:
    """So that a job that measures its workers, and one that knows them, come to the same bits."""
    curves = [HOST, *(profile(name, 0.01 + 0.003 * n, kind="csd") for n, name in enumerate(NAMES[1:]))]
    plans = set()
    for order in permutations(range(4)):
        made = Planner(SynchronousSpec(), NAMES)
        for rank in order:
            made.join(rank, curves[rank], PLENTY, PLENTY)
        plans.add(tuple(planned(made)))
    assert len(plans) == 1


def test_a_worker_that_leaves_has_no_batch_and_has_its_own_again_on_return() -> None:
    made = planner()
    before = planned(made)
    made.leave(2)
    assert planned(made)[2] == 0 and not made.background[2]
    assert "csd1" not in made.description and "csd0" in made.description
    made.leave(2)  # twice is once
    made.join(2, DEVICES[1], PLENTY, PLENTY)
    assert planned(made) == before


def test_a_worker_that_returns_is_planned_at_its_measured_speed() -> None:
    made = planner()
    before = planned(made)
    observe(made, {2: 3.0})
    assert planned(made)[2] < before[2]
    made.leave(2)
    made.join(2, DEVICES[1], PLENTY, PLENTY)
    assert planned(made)[2] >= before[2] - 1


@pytest.mark.parametrize("newcomer", ["another worker", "another curve of one that was there"])
def test_a_new_curve_leaves_what_is_known_of_others(newcomer: str) -> None:
    made = planner(there=3)
    observe(made, {1: 3.0})
    slow, known = planned(made)[1], re.compile(r"csd0 \d+ samples \(\d+%\), (2\.[89]|3\.)\d* times as slow")
    assert known.search(made.description)
    if newcomer == "another worker":
        made.join(3, DEVICES[2], PLENTY, PLENTY)
    else:
        made.leave(2)
        made.join(2, profile("csd1", 0.0101, kind="csd"), PLENTY, PLENTY)
    assert planned(made)[1] == pytest.approx(slow, abs=1)
    assert known.search(made.description)


def test_a_worker_measured_anew_has_the_batch_of_its_new_curve() -> None:
    made = planner()
    made.leave(0)
    made.join(0, profile("host", 0.01), PLENTY, PLENTY)
    others = planned(made)[1:]
    assert planned(made)[0] == others[0] and others == 3 * [others[0]]


def test_a_worker_absent_when_a_curve_comes_stays_absent() -> None:
    made = planner(there=3)
    made.leave(1)
    made.join(3, DEVICES[2], PLENTY, PLENTY)
    assert planned(made)[1] == 0 and planned(made)[3] > 0


def test_memory_bounds_a_batch() -> None:
    made = Planner(SynchronousSpec(), NAMES)
    made.join(0, HOST, 10, PLENTY)
    made.join(1, DEVICES[0], 0, PLENTY)
    assert planned(made)[0] == 10
    assert planned(made)[1] == 0 and not made.background[1]


def test_an_epoch_has_as_many_steps_as_it_is_to_have() -> None:
    made = planner(SynchronousSpec(steps=16), shards=shards_of(80), samples=320)
    likes = sum(planned(planner()))
    assert likes > 20 == sum(planned(made))
    assert float(made.plan.times.max()) < 0.2
    assert made.plan.deadline == pytest.approx(float(made.plan.times.max()) + 0.1)


@pytest.mark.parametrize("wanted", [24, 48, 100])
def test_a_global_batch_that_workers_like_is_the_sum_of_each_step(wanted: int) -> None:
    made = planner(SynchronousSpec(global_batch=wanted), shards=shards_of(10_000, public=True))
    assert sum(planned(made)) == wanted
    made.leave(3)
    assert sum(planned(made)) == min(wanted, sum(planned(planner(there=3)))) and not planned(made)[3]


def test_a_step_is_smaller_where_otherwise_somebodys_own_samples_would_be_left_to_the_end() -> None:
    shards = shards_of(10_000)
    assert planned(planner(SynchronousSpec(global_batch=24), shards=shards)) == [6, 6, 6, 6]
    slowest = planned(planner())[1]
    assert planned(planner(SynchronousSpec(global_batch=100), shards=shards)) == 4 * [slowest]


def test_a_global_batch_beyond_what_workers_like_is_had_as_far_as_they_can() -> None:
    likes = sum(planned(planner()))
    assert sum(planned(planner(SynchronousSpec(global_batch=likes + 40)))) == likes + 40
    assert sum(planned(planner(SynchronousSpec(global_batch=100_000)))) == 4 * 64


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_each_policy_by_name(name: PolicyName) -> None:
    made = planner(SynchronousSpec(policy=name))
    before = planned(made)
    assert all(before)
    observe(made, {1: 3.0}, 60)
    assert (planned(made) == before) is (name in ("fixed", "stannis-cpu"))  # of which one goes by the load
    assert planned(made)[1] <= before[1]


def test_without_patience_a_step_waits_for_everybody() -> None:
    def spread(batches: Ints, most: int) -> Ints:
        return batches // 2

    for made in (planner(SynchronousSpec(patience=0)), Planner(SynchronousSpec(patience=0), NAMES, spread)):
        made.join(0, HOST, PLENTY, PLENTY)
        assert made.plan.deadline == float("inf")


def test_a_worker_that_is_too_slow_sits_out_and_works_beside() -> None:
    made = planner()
    assert not made.background.any()
    observe(made, {3: 400.0})
    assert planned(made)[3] == 0 and made.background[3] and not made.background[2]
    rest = made.background.tolist()
    assert rest[:3] == [0, 0, 0] and 2 <= rest[3] <= 64
    assert re.search(r"csd2 sits out, \d{3}\.\d\d times as slow", made.description)
    made.leave(3)
    assert not made.background.any()


@pytest.mark.parametrize("spec", [SynchronousSpec(steps=16), SynchronousSpec(global_batch=20)])
def test_a_worker_beside_has_a_part_of_a_step_that_is_smaller_than_workers_like(
    spec: SynchronousSpec,
) -> None:
    """Else its sum outweighs many steps, comes after all of them, and a change of its speed shows late."""
    made = planner(spec, shards=shards_of(80), samples=320)
    observe(made, {3: 400.0})
    assert sum(planned(made)) <= 20 and planned(made)[3] == 0
    assert made.background.tolist() == [0, 0, 0, 5]


@pytest.mark.parametrize("policy", ["balance", "fixed"])
def test_a_slow_worker_is_in_the_global_batch_of_steps_that_wait_for_all(policy: PolicyName) -> None:
    """Else a step had more samples than the job asks for, and an epoch fewer steps."""
    spec = SynchronousSpec(patience=0, policy=policy, global_batch=48)
    made = planner(spec, shards=shards_of(100), samples=400, last=profile("csd2", 4.0, kind="csd"))
    assert sum(planned(made)) == 48 and planned(made)[3] >= 10
    assert not made.background.any()
    assert made.plan.times[3] > 40 and made.plan.deadline == float("inf")
    assert "sits out" not in made.description


def test_the_line_says_what_the_plan_is() -> None:
    made = planner()
    plan, line = made.plan, made.description
    total, seconds = int(plan.batches.sum()), float(plan.times.max())
    assert line.startswith(
        f"a step of {total} samples takes {seconds:.3f} s, {total / seconds:.1f} per second: "
    )
    for name, batch in zip(NAMES, plan.batches.tolist(), strict=True):
        assert f"{name} {batch} samples ({batch / total:.0%})" in line
    assert "slow" not in line


@pytest.mark.parametrize("policy", ["balance", "fixed"])
def test_a_worker_whose_samples_come_in_large_groups_is_planned_with_them(policy: str) -> None:
    """Its curve may end, or its speed peak, below the samples of a group."""
    shards = Shards(4)
    shards.begin(1)
    made = Planner(SynchronousSpec(steps=8, policy=policy), NAMES, shards.spread)  # type: ignore[arg-type]
    for rank, measured in enumerate([HOST, *DEVICES]):
        shards.add(rank, [Shard(NAMES[rank], False, 1990, 100 if rank else 1)])
        made.join(rank, measured, PLENTY, shards.samples, shards.largest_group(rank))
    assert shards.largest_group(0) == 0 and shards.largest_group(1) == 190
    before = made.plan
    assert all(batch % 100 == 0 and batch <= 190 for batch in planned(made)[1:])
    dealt = [
        sum(stop - start for ranges in share for start, stop in ranges)
        for share in shards.deal(planned(made))
    ]
    assert dealt[1:] == planned(made)[1:]
    for _ in range(40):
        made.observe(before.batches, 4 * before.times)
    slowness = made._slowness()
    assert policy == "fixed" or min(slowness.values()) > 3


def test_nobody_sits_out_of_steps_that_are_shorter_than_what_a_clock_tells() -> None:
    """The smallest batch of a device takes longer than the largest of the host, and all of them next to no
    time; that one step was disturbed changes nothing.
    """
    made = Planner(SynchronousSpec(), NAMES)
    made.join(0, profile("host", 0.00001, 0.0005), PLENTY, PLENTY)
    for rank, name in enumerate(NAMES[1:], 1):
        made.join(rank, profile(name, 0.0005, 0.002, kind="csd"), PLENTY, PLENTY)
    assert all(planned(made)) and not made.background.any()
    for _ in range(5):
        made.observe(made.plan.batches, np.array([0.004, 0.02, 0.05, 0.02]), WITHOUT_LOAD)
    assert all(planned(made))
    for _ in range(40):  # by others on the processor, as much as scheduling may add
        made.observe(made.plan.batches, np.array([0.004, 0.04, 0.04, 0.04]), WITHOUT_LOAD)
    assert all(planned(made)) and not made.background.any()


def test_no_speed_is_told_of_steps_that_are_shorter_than_what_a_clock_tells() -> None:
    made = Planner(SynchronousSpec(), NAMES)
    made.join(0, profile("host", 0.00001, 0.0005), PLENTY, PLENTY)
    assert made.description == "a step of 64 samples takes less than 0.05 s: host 64 samples (100%)"
