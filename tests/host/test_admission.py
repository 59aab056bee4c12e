# SPDX-License-Identifier: Apache-2.0
"""Which workers a job takes again after a loss: with which batch, how often in a row, and who is refused."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millpond.base.errors import Refused
from millpond.host.fleet.directory import FleetConfig
from millpond.host.jobs.attempts import TRIES, Attempts
from millpond.host.jobs.context import JobContext, JobFailed
from millpond.host.jobs.training import trainer as module
from millpond.host.jobs.training.admission import Admission
from millpond.host.jobs.training.membership import BAN_SECONDS, LOSSES
from millpond.host.jobs.training.planner import Planner
from millpond.host.jobs.training.roster import JobRoster
from millpond.host.jobs.training.round_planner import RoundPlanner, RoundSchedule
from millpond.host.jobs.training.shards import Shard, Shards
from millpond.host.jobs.training.trainer import Trainer
from millpond.host.jobs.training.worker_group import WorkerGroup
from millpond.host.records.jobs import JobRow
from millpond.host.workers.dispatcher import Assignment, Dispatcher, WorkerAnswer, WorkerLoss
from millpond.train.balance.profiling import Point, Profile
from millpond.train.job.spec import DataSpec, Job, ModelSpec, SynchronousSpec
from millpond.train.protocol import Ready, Work

from .steps import Given, Team, zero_state

NAMES = ("w0", "w1", "w2")
POINTS = tuple(Point(batch, 0.01 * batch, batch << 20) for batch in (2, 4, 8, 16))
"""Each sample takes a MiB."""


class Rig:
    """The admission of a job whose third worker has 40 samples in groups of ``group``, and was measured by an
    earlier job. ``ends`` is what became of workers, with the reason.
    """

    def __init__(self, team: Team, group: int, memory: int = 1 << 40) -> None:
        self.team, self.ends = team, list[tuple[str, str]]()
        self.third = team.roster.present[2]
        team.roster.leave(2)
        shards = Shards(3)
        shards.begin(1)
        shards.add(2, [Shard("w2", False, 40, group)])
        self.planner = Planner(SynchronousSpec(), NAMES, shards.spread)
        self._absent = SimpleNamespace(worker=None, ready=None, failure="")
        self.supervisor = SimpleNamespace(
            worker=None,
            ready=Ready((40,)),
            failure="",
            lose=lambda _worker, reason, _pause: self.ends.append(("lost", reason)),
            ban=lambda _worker, reason: self.ends.append(("banned", reason)),
        )
        workers: Any = SimpleNamespace(
            names=NAMES,
            supervisor=lambda rank: self.supervisor if rank == 2 else self._absent,
            shards_of=lambda _rank, _ready: [Shard("w2", False, 40, group)],
            local=SimpleNamespace(normalized=False),
        )
        load, welcome = SimpleNamespace(memory_used=0), SimpleNamespace(memory=memory, software="")
        device = SimpleNamespace(status=SimpleNamespace(welcome=welcome, load=load))
        store = SimpleNamespace(profile=lambda name, _fingerprint: Profile(name, "virtual", POINTS))
        context: Any = SimpleNamespace(
            devices={"w2": device}, store=store, fleet=SimpleNamespace(config=FleetConfig("tests"))
        )
        job = Job("steps", DataSpec("private/a"), model=ModelSpec("net:Net"), synchronous=SynchronousSpec())
        row: Any = SimpleNamespace(job=job, files={})
        log = logging.getLogger("tests.admission")
        self.admission = Admission(row, context, workers, team.roster, shards, self.planner, log)

    def admit(self) -> int:
        """Admit the third worker, as it is prepared. Returns its batch, 0 without one."""
        self.supervisor.worker = self.third.worker
        self.admission.admit_new(zero_state(self.team.size))
        return int(self.planner.plan.batches[2])

    def lose(self, batch: int, *, at_limit: bool) -> None:
        """Have the third worker run out of memory, its own or that of all."""
        task = Assignment(Work(1, 1, 1, (((0, batch),),)), zero_state(self.team.size))
        loss = WorkerLoss(self.third, task, "out of memory", for_good=at_limit, out_of_memory=True)
        self.admission.lost(loss)


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team([40, 10, 40])
    yield made
    made.close()


@pytest.mark.expected_log("it goes on without w2: out of memory")
@pytest.mark.parametrize(("batch", "group", "stays"), [(24, 8, True), (12, 8, False), (3, 1, False)])
def test_a_worker_at_its_limit_of_memory_comes_back_with_half_the_batch_or_once_more(
    team: Team, batch: int, group: int, stays: bool
) -> None:
    """Before: one without a smaller batch was out the first time."""
    rig = Rig(team, group)
    rig.lose(batch, at_limit=True)
    assert rig.ends == [("lost", "out of memory")]
    if stays:
        assert 0 < rig.admit() <= batch // 2
    else:
        rig.lose(batch, at_limit=True)
        assert rig.ends[-1] == ("banned", "out of memory")


@pytest.mark.expected_log("it goes on without w2: out of memory")
def test_a_machine_without_memory_halves_the_batch_and_is_never_for_good(team: Team) -> None:
    """Before: a worker that the kernel chose when the memory of all ran out was out of its job."""
    rig = Rig(team, 8)
    for batch in (64, 32, 8, 8):
        rig.lose(batch, at_limit=False)
    assert [how for how, _ in rig.ends] == ["lost"] * 4
    assert 0 < rig.admit() <= 16


@pytest.mark.expected_log("it goes on without w2: its answers cover 40 samples")
@pytest.mark.parametrize(("group", "refused"), [(8, False), (30, True)])
def test_a_worker_without_the_memory_for_a_group_is_refused_by_name(
    team: Team, group: int, refused: bool
) -> None:
    """40 samples in groups of 30 are one group."""
    rig = Rig(team, group, memory=25 << 20)  # of which it may have 0.8
    assert bool(rig.admit()) is not refused and (2 in team.roster.present) is not refused
    reason = "its answers cover 40 samples, and its memory takes 20"
    assert rig.ends == ([("lost", reason)] if refused else [])


def test_what_comes_while_no_exchange_runs_counts_in_the_next_one(team: Team) -> None:
    team.workers[1].hold_at(1)
    assert team.run_until_late(Given(4, 10, 4, deadline=600.0), 1).counted == {0: 4, 2: 4}
    team.workers[1].hold_at(1).set()
    event = None
    while not event:
        event = team.roster.wait(1.0)
    assert isinstance(event, WorkerAnswer)
    team.roster.keep(event)
    outcome = team.run(Given(4, 10, 4))
    assert (outcome.counted, outcome.late) == ({0: 4, 1: 10, 2: 4}, 10)
    team.finish(Given(4, 10, 4))
    assert team.once


class Rounds:
    """The admission of a job in rounds of two workers, with what becomes of them: pauses and bans."""

    def __init__(self, team: Team) -> None:
        self.team, self.ends = team, list[tuple[str, float]]()
        self.second = team.roster.present[1]
        supervisor = SimpleNamespace(
            lose=lambda _worker, reason, pause: self.ends.append((reason, pause)),
            ban=lambda _worker, reason: self.ends.append((reason, math.inf)),
        )
        group = SimpleNamespace(names=("w0", "w1"), supervisor=lambda _rank: supervisor)
        self.admission = Admission(
            cast(JobRow, None),
            cast(JobContext, None),
            cast(WorkerGroup, group),
            team.roster,
            team.shards,
            RoundPlanner(group.names, 60.0),
            logging.getLogger("tests.giving_up"),
        )

    def lose(self, *, scoring: bool = False, limit: bool = False) -> float:
        """Lose the second worker, and have it come back. Returns its pause."""
        self.team.roster.join(1, self.second)
        task = Assignment(Work(1, 1, 1, (), held_out=scoring), zero_state(self.team.size))
        dispatcher = self.second
        self.admission.lost(WorkerLoss(dispatcher, task, "gone", for_good=limit, out_of_memory=limit))
        return self.ends[-1][1]


@pytest.fixture
def rounds() -> Iterator[Rounds]:
    team = Team([10, 10])
    yield Rounds(team)
    team.close()


LOST = pytest.mark.expected_log("it goes on without w1: gone")


@LOST
def test_a_worker_that_trains_well_and_dies_at_every_score_is_banned(rounds: Rounds) -> None:
    """Before: each round that it had trained in ended the row, and it was prepared anew for ever."""
    pauses = []
    for _ in range(LOSSES + 1):
        rounds.team.roster.counted([1])
        pauses.append(rounds.lose(scoring=True))
    assert pauses == [0.0] * (LOSSES - 1) + [BAN_SECONDS, 2 * BAN_SECONDS]
    assert "for the 4th time in a row" in rounds.ends[-1][0]
    rounds.team.roster.counted([1], scoring=True)
    assert rounds.lose(scoring=True) == 0.0


@LOST
def test_a_worker_at_its_limit_of_memory_is_out_the_second_time_in_a_row(rounds: Rounds) -> None:
    """Before: the first time."""
    for _ in range(3):
        assert rounds.lose(limit=True) == 0.0
        rounds.team.roster.counted([1])
    assert rounds.lose(limit=True) == 0.0
    assert rounds.lose() == 0.0  # another reason
    rounds.team.roster.counted([1])
    assert [rounds.lose(limit=True), rounds.lose(limit=True)] == [0.0, math.inf]


@pytest.mark.parametrize(("steps", "tries"), [((1,), TRIES), (range(1, 21), 20 + TRIES - 1)])
def test_only_progress_ends_a_row_of_losses(steps: Sequence[int], tries: int) -> None:
    """Before: the round that was trained anew each time counted as progress, and the job went on for ever."""
    made, lost = Attempts(), 0
    while True:
        for step in range(1, steps[min(lost, len(steps) - 1)] + 1):
            made.reached(step)
        lost += 1
        if made.lose() is None:
            break
    assert lost == tries


class Group:
    """A group of workers that has time for every attempt."""

    names, reasons = ("csd0",), ""

    def check_stop(self) -> None:
        """Go on."""

    def wait(self, seconds: float) -> None:
        """Wait for nothing."""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trainer of rounds on one device."""
    monkeypatch.setattr(module, "WorkerGroup", lambda *_: Group())
    row = SimpleNamespace(id=1, job=Job("rounds", DataSpec("private/a"), model=ModelSpec("net:Net")))
    fleet = SimpleNamespace(job_directory=lambda _number: tmp_path)
    context = SimpleNamespace(fleet=fleet, changed=lambda: None)
    return Trainer(cast(JobRow, row), cast(JobContext, context), threading.Event())


@pytest.mark.expected_log("the parameter server was lost: ")
@pytest.mark.parametrize(("code", "tries"), [("machine-memory", TRIES), ("memory", 1), ("model", 1)])
def test_a_machine_without_memory_is_no_fault_of_the_model_on_the_host(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, code: str, tries: int
) -> None:
    """Before: a parameter server that the kernel chose ended its job."""
    tried: list[str] = []

    def attempt() -> None:
        tried.append(code)
        raise Refused("", code, "out of memory")

    monkeypatch.setattr(trainer, "_attempt", attempt)
    with pytest.raises(JobFailed):
        trainer.run()
    assert len(tried) == tries


@pytest.mark.parametrize("most_late", [False, True])
def test_devices_that_take_part_and_are_late_have_longer(trainer: Trainer, most_late: bool) -> None:
    """A job whose longer deadlines help nothing names the deadline as its fault."""
    schedule = trainer._schedule = RoundSchedule(trainer._job, ["csd0"])
    schedule.planner.most_late = most_late
    trainer._roster = JobRoster(1, [0], 1.0)
    trainer._roster.join(0, cast(Dispatcher, None))
    trainer._progressed -= 3600.0
    if most_late:
        trainer._check_quorum()
        return
    with pytest.raises(JobFailed, match=r"answer within the deadline of a round: federated\.deadline"):
        trainer._check_quorum()
