# SPDX-License-Identifier: Apache-2.0
"""Admission while workers take part already: what they answer meanwhile is kept for the next exchange."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from millpond.base.errors import ConnectionLost
from millpond.host.fleet.directory import FleetConfig
from millpond.host.jobs.context import JobContext
from millpond.host.jobs.training.admission import Admission
from millpond.host.jobs.training.membership import Membership
from millpond.host.jobs.training.planner import Planner
from millpond.host.jobs.training.profiler import Profiler
from millpond.host.jobs.training.shards import Shard, Shards
from millpond.host.jobs.training.worker_group import WorkerGroup
from millpond.host.records.jobs import JobRow
from millpond.host.workers.dispatcher import Assignment, Dispatcher, WorkerLoss
from millpond.train.balance.profiling import Point, Probe, Profile
from millpond.train.job.spec import LimitsSpec, SynchronousSpec
from millpond.train.protocol import Work

from .steps import Given, Team, zero_state


class NoDevices:
    """The part of a group and of a context that looking for silent devices takes."""

    def __init__(self) -> None:
        self.devices: dict[str, object] = {}
        self.fleet = SimpleNamespace(config=FleetConfig("tests"))

    def check_stop(self) -> None:
        pass


@pytest.fixture
def team() -> Iterator[Team]:
    """Three workers, of whom the second is late in the first exchange."""
    made = Team([40, 10, 40])
    try:
        made.workers[1].hold_at(1)
        assert made.run_until_late(Given(4, 10, 4, deadline=600.0), 1).counted == {0: 4, 2: 4}
        yield made
    finally:
        made.close()


def profiled(team: Team, rank: int) -> list[Profile]:
    """Profile a worker to its end, as where no quorum takes part, while the second one answers."""
    group, log = NoDevices(), logging.getLogger("tests.admission")
    admission = Admission(
        cast(JobRow, None),
        cast(JobContext, group),
        cast(WorkerGroup, group),
        team.engine,
        team.shards,
        Planner(SynchronousSpec(), ["w0", "w1", "w2"]),
        Membership(3, range(3), 1.0),
        log,
    )
    done: list[Profile] = []

    def finished(dispatcher: Dispatcher, profile: Profile) -> None:
        done.append(profile)
        team.engine.dispatchers[dispatcher.rank] = dispatcher

    admission._profiler = team.engine.profiler = Profiler(finished, print)
    newcomer = team.engine.dispatchers.pop(rank)
    team.workers[1].hold_at(1).set()
    while team.engine.events.empty():
        time.sleep(0.001)
    admission._profiler.begin(newcomer, "virtual", Probe(0.05, 40), zero_state(team.size))
    while not done:
        admission.handle_profile()
    assert not admission.profiling
    return done


def test_a_late_answer_that_comes_while_another_is_profiled_counts_in_the_next_exchange(team: Team) -> None:
    (profile,) = profiled(team, 2)
    assert profile.worker == "w2" and profile.points
    outcome = team.run(Given(4, 10, 4))
    assert (outcome.counted, outcome.late) == ({0: 4, 1: 10, 2: 4}, 10)
    team.finish(Given(4, 10, 4))
    assert team.once


def test_a_loss_that_comes_while_another_is_profiled_is_told_by_the_next_exchange(team: Team) -> None:
    team.workers[1].fail_at(1, ConnectionLost("gone"))
    profiled(team, 2)
    outcome = team.run(Given(4, 10, 4))
    assert [loss.reason for loss in outcome.lost] == ["gone"] and outcome.counted == {0: 4, 2: 4}
    team.join(1)
    team.finish(Given(4, 10, 4))
    assert team.once


@pytest.mark.expected_log("it goes on without w2: out of memory")
@pytest.mark.parametrize(("batch", "group", "stays"), [(64, 8, True), (12, 8, False), (3, 1, False)])
def test_a_worker_at_its_limit_of_memory_comes_back_with_half_the_batch_or_once_more(
    team: Team, batch: int, group: int, stays: bool
) -> None:
    """Before: one without a smaller batch was out the first time."""
    admission, ends = admission_of_three(team, group)
    newcomer = team.engine.dispatchers.pop(2)
    task = Assignment(Work(1, 1, 1, (((0, batch),),)), zero_state(team.size))
    loss = WorkerLoss(newcomer, task, "out of memory", for_good=True, out_of_memory=True)
    admission.lost(loss)
    assert ends == ["lost"]
    if not stays:
        admission.lost(loss)
        assert ends == ["lost", "banned"]
    else:
        admission._memory_limit = lambda _rank: None  # type: ignore[method-assign]
        points = tuple(Point(each, 0.01 * each, each << 20) for each in (2, 4, 8, 16))
        joined: list[int] = []
        admission._planner.join = lambda *given: joined.append(given[2])  # type: ignore[method-assign]
        admission._join(newcomer, Profile("w2", "virtual", points))
        assert joined and joined[0] <= batch // 2
    newcomer.end()


@pytest.mark.expected_log("it goes on without w2: out of memory")
def test_a_machine_without_memory_halves_the_batch_and_is_never_for_good(team: Team) -> None:
    """Before: a worker that the kernel chose when the memory of all ran out was out of its job."""
    admission, ends = admission_of_three(team, 8)
    newcomer = team.engine.dispatchers.pop(2)
    for batch in (64, 32, 8, 8):
        task = Assignment(Work(1, 1, 1, (((0, batch),),)), zero_state(team.size))
        admission.lost(WorkerLoss(newcomer, task, "out of memory", for_good=False, out_of_memory=True))
    assert ends == ["lost"] * 4 and admission._most[2] == 16
    newcomer.end()


def admission_of_three(team: Team, group: int) -> tuple[Admission, list[str]]:
    """An admission whose third worker has samples in such groups, and what becomes of workers."""
    shards, ends = Shards(3), list[str]()
    shards.begin(1)
    shards.add(2, [Shard("w2", False, 40, group)])
    supervisor = SimpleNamespace(
        lose=lambda _worker, _reason, _pause: ends.append("lost"),
        ban=lambda _worker, _reason: ends.append("banned"),
    )
    group_ = SimpleNamespace(names=("w0", "w1", "w2"), supervisor=lambda _rank: supervisor)
    admission = Admission(
        cast(JobRow, SimpleNamespace(job=SimpleNamespace(limits=LimitsSpec()))),
        cast(JobContext, NoDevices()),
        cast(WorkerGroup, group_),
        team.engine,
        shards,
        Planner(SynchronousSpec(), list(group_.names), shards.spread),
        Membership(3, range(3), 1.0),
        logging.getLogger("tests.admission"),
    )
    return admission, ends


@pytest.mark.expected_log("it goes on without w2: its answers cover 40 samples")
@pytest.mark.parametrize(("group", "refused"), [(8, False), (30, True)])
def test_a_worker_without_the_memory_for_a_group_is_refused_by_name(
    team: Team, group: int, refused: bool
) -> None:
    """40 samples in groups of 30 are one group."""
    shards = Shards(3)
    shards.begin(1)
    shards.add(2, [Shard("w2", False, 40, group)])
    lost: list[str] = []
    supervisor = SimpleNamespace(lose=lambda _worker, reason, _pause: lost.append(reason))
    group_ = SimpleNamespace(names=("w0", "w1", "w2"), supervisor=lambda _rank: supervisor)
    planner, membership = (
        Planner(SynchronousSpec(), group_.names, shards.spread),
        Membership(3, range(3), 1.0),
    )
    admission = Admission(
        cast(JobRow, SimpleNamespace(job=SimpleNamespace(limits=LimitsSpec()))),
        cast(JobContext, NoDevices()),
        cast(WorkerGroup, group_),
        team.engine,
        shards,
        planner,
        membership,
        logging.getLogger("tests.admission"),
    )
    admission._memory_limit = lambda _rank: 20 << 20  # type: ignore[method-assign]
    points = tuple(Point(batch, 0.01 * batch, batch << 20) for batch in (2, 4, 8, 16))
    newcomer = team.engine.dispatchers.pop(2)
    admission._join(newcomer, Profile("w2", "virtual", points))
    assert (2 in team.engine.dispatchers) is not refused
    assert lost == (["its answers cover 40 samples, and its memory takes 20"] if refused else [])
    newcomer.end()
