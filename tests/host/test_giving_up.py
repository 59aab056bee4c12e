# SPDX-License-Identifier: Apache-2.0
"""The end of patience: losses count in a row, not in a lifetime, in training and in scoring alike."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millpond.base.errors import ConnectionLost, Refused
from millpond.host.jobs.attempts import TRIES
from millpond.host.jobs.context import JobContext, JobFailed
from millpond.host.jobs.training import trainer as module
from millpond.host.jobs.training.admission import Admission
from millpond.host.jobs.training.epoch import Epoch
from millpond.host.jobs.training.exchange_engine import ExchangeOutcome
from millpond.host.jobs.training.membership import BAN_SECONDS, LOSSES, MemberState
from millpond.host.jobs.training.roster import JobRoster
from millpond.host.jobs.training.round_planner import RoundPlanner, RoundSchedule
from millpond.host.jobs.training.trainer import Trainer
from millpond.host.jobs.training.worker_group import WorkerGroup
from millpond.host.records.jobs import JobRow
from millpond.host.workers.dispatcher import Assignment, Dispatcher, WorkerLoss
from millpond.host.workers.parameter_server import ParameterServer
from millpond.train.job.spec import DataSpec, Job, ModelSpec
from millpond.train.protocol import Work

from .steps import Team, zero_state


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
def test_a_worker_that_dies_in_every_round_is_banned_and_cools_down(rounds: Rounds) -> None:
    pauses = [rounds.lose() for _ in range(LOSSES + 2)]
    assert pauses == [0.0] * (LOSSES - 1) + [BAN_SECONDS * 2**number for number in range(3)]
    assert rounds.team.roster.state(1, time.monotonic()) is MemberState.BANNED
    assert rounds.ends[-1][0] == "gone, for the 5th time in a row: banned for 120 s"


@LOST
def test_deaths_between_rounds_that_count_are_no_row(rounds: Rounds) -> None:
    for _ in range(5 * LOSSES):
        assert rounds.lose() == 0.0
        rounds.team.roster.counted([1])


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


class Group:
    """A group of workers that has time for every attempt; ``waits`` are the pauses between them."""

    def __init__(self) -> None:
        self.names, self.waits = ("csd0",), list[float]()

    def check_stop(self) -> None:
        assert len(self.waits) < 50, "the job is tried for ever"

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    made = Group()
    monkeypatch.setattr(module, "WorkerGroup", lambda *_: made)
    return made


@pytest.fixture
def trainer(tmp_path: Path, group: Group) -> Trainer:
    """A trainer of rounds whose parameter server applies whatever it is given."""
    row = SimpleNamespace(id=1, job=Job("rounds", DataSpec("private/a"), model=ModelSpec("net:Net")))
    fleet = SimpleNamespace(job_directory=lambda _number: tmp_path)
    made = Trainer(cast(JobRow, row), cast(JobContext, SimpleNamespace(fleet=fleet)), threading.Event())
    made._schedule = RoundSchedule(made._job, ["csd0"])
    made._nodes, made._roster = None, JobRoster(1, [0], 1.0)
    made._server = cast(ParameterServer, SimpleNamespace(apply=lambda *_: 0.0))
    made._epoch, made._step, made._state_checked = Epoch(), 0, True
    return made


ROUND = ExchangeOutcome(counted={0: 10}, whole=10)
SERVER_LOST = pytest.mark.expected_log("the parameter server was lost: ")
DIED = ConnectionLost("the worker 'parameter-server' closed the connection")


def attempts(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, *steps: int, end: Exception = DIED) -> int:
    """Run a job whose attempts apply so many rounds, the last of ``steps`` from then on, and end by ``end``.
    Returns how many attempts there were.
    """
    done: list[int] = []

    def attempt() -> None:
        trainer._step = 0  # of the last checkpoint
        for _ in range(steps[min(len(done), len(steps) - 1)]):
            trainer._apply(ROUND)
        done.append(trainer._step)
        raise end

    monkeypatch.setattr(trainer, "_attempt", attempt)
    with pytest.raises(JobFailed):
        trainer.run()
    return len(done)


@SERVER_LOST
def test_a_parameter_server_that_dies_at_each_score_ends_the_job(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the round that was trained anew each time counted as progress, and the job went on for ever."""
    assert attempts(trainer, monkeypatch, 1) == TRIES


@SERVER_LOST
def test_losses_of_the_parameter_server_with_progress_between_them_are_no_row(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attempts(trainer, monkeypatch, *range(1, 21)) == 20 + TRIES - 1


@SERVER_LOST
@pytest.mark.parametrize(("code", "tries"), [("machine-memory", TRIES), ("memory", 1), ("model", 1)])
def test_a_machine_without_memory_is_no_fault_of_the_model_on_the_host(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, code: str, tries: int
) -> None:
    """Before: a parameter server that the kernel chose ended its job."""
    assert attempts(trainer, monkeypatch, 0, end=Refused("", code, "out of memory")) == tries


def test_an_evaluation_that_is_longer_than_limits_wait_is_progress(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: its time counted as one without a quorum: a device that was lost just then ended the job."""
    nothing = cast(Any, SimpleNamespace(begin=bool, add=lambda *_: False, is_due=lambda _: True, prune=bool))
    nothing.best = nothing.standing = nothing.final_round = None
    nothing.settle = lambda _best, _final: None
    trainer._shards = trainer._board = trainer._checkpoints = trainer._best = nothing
    trainer._admission = cast(Admission, SimpleNamespace(take_events=tuple))
    fake = SimpleNamespace(energy=bool, add_round=lambda *_: None, changed=bool, store=None)
    fake.store = fake
    trainer._context = cast(JobContext, fake)
    monkeypatch.setattr(module.job_energy, "between", lambda *_: SimpleNamespace(joules={}, energy={}))
    for name, value in (("_bytes_since", {}), ("_snapshot", None), ("_is_behind", True)):
        monkeypatch.setattr(Trainer, name, value if name == "_is_behind" else lambda *_, v=value: v)
    monkeypatch.setattr(Trainer, "_is_save_due", False)
    monkeypatch.setattr(trainer, "_report", lambda _result: None)

    def score() -> dict[str, dict[str, float | None]]:
        trainer._progressed -= 3600.0  # so long does it take
        return {}

    monkeypatch.setattr(trainer, "_score", score)
    trainer._epoch.count(ROUND, ["csd0"])
    trainer._reasons = {}
    before = trainer._progressed
    trainer._end_epoch(None)
    assert trainer._progressed >= before


@pytest.mark.parametrize("most_late", [False, True])
def test_devices_that_take_part_and_are_late_have_longer(trainer: Trainer, most_late: bool) -> None:
    """A job whose longer deadlines help nothing names the deadline as its fault."""
    schedule = trainer._schedule = RoundSchedule(trainer._job, ["csd0"])
    schedule.planner.most_late = most_late
    trainer._group.reasons = ""  # type: ignore[misc]
    trainer._roster.join(0, cast(Dispatcher, None))
    trainer._progressed -= 3600.0
    if most_late:
        trainer._check_quorum()
        return
    with pytest.raises(JobFailed, match=r"answer within the deadline of a round: federated\.deadline"):
        trainer._check_quorum()
