# SPDX-License-Identifier: Apache-2.0
"""A newcomer is profiled also where no exchange waits: before a resumed job begins, and as an epoch ends."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import cast

import pytest

from millpond.host.api.daemon import Curves
from millpond.host.jobs.training.admission import Admission
from millpond.host.jobs.training.epoch import Epoch
from millpond.host.jobs.training.exchange_engine import ExchangeOutcome
from millpond.host.jobs.training.roster import JobRoster
from millpond.host.jobs.training.shards import Shard, Shards
from millpond.host.jobs.training.trainer import Trainer
from millpond.host.jobs.training.worker_group import WorkerGroup
from millpond.host.workers.dispatcher import Dispatcher


class Profiling:
    """An admission with one worker that is profiled, which takes three answers."""

    def __init__(self) -> None:
        self.left, self.begun = 3, 0

    @property
    def profiling(self) -> bool:
        return self.left > 0

    def handle_profile(self) -> None:
        self.left -= 1

    def begin(self) -> Curves:
        self.begun += 1
        return Curves((), {})


class Group:
    """Two devices, and how often somebody waited for them."""

    def __init__(self) -> None:
        self.names, self.waits = ("csd0", "csd1"), 0

    def wait(self, seconds: float) -> None:
        self.waits += 1


def trainer_of(admission: Profiling) -> Trainer:
    """Return a trainer that has nothing but its admission."""
    trainer = object.__new__(Trainer)
    trainer._admission = cast(Admission, admission)
    return trainer


def test_a_resumed_job_with_a_quorum_profiles_its_newcomer_and_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admission = Profiling()
    trainer = trainer_of(admission)
    monkeypatch.setattr(trainer, "_can_begin", lambda: True)
    trainer._gather()
    assert (admission.left, admission.begun) == (0, 1)


def test_the_end_of_an_epoch_profiles_the_newcomer_whose_samples_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admission, group, shards, roster = Profiling(), Group(), Shards(2), JobRoster(2, range(2), 0.5)
    shards.begin(1)
    assert shards.add(1, [Shard("csd1", False, 10)]) == ""
    roster.join(0, cast(Dispatcher, None))
    trainer = trainer_of(admission)
    trainer._group, trainer._shards = cast(WorkerGroup, group), shards
    trainer._roster, trainer._absent_since = roster, {}
    monkeypatch.setattr(trainer, "_is_awaited", lambda name, seconds: name == "csd1")
    for left in (2, 1, 0):
        assert trainer._await_absent()
        assert (admission.left, group.waits) == (left, 0)
    assert trainer._await_absent() and group.waits == 1
    roster.join(1, cast(Dispatcher, None))
    assert not trainer._await_absent()


def test_a_round_that_begins_again_is_told_with_those_that_were_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: it went back to its beginning without a word."""
    trainer, began = trainer_of(Profiling()), list[int]()
    trainer._group, trainer._epoch = cast(WorkerGroup, Group()), Epoch(3)
    trainer._shards = cast(Shards, SimpleNamespace(begin=began.append))
    monkeypatch.setattr(trainer, "_check_quorum", lambda: None)
    trainer.log = logging.getLogger("trainer")
    with caplog.at_level(logging.INFO):
        trainer._begin_again(ExchangeOutcome(missing=[1], deadline=60.0))
        trainer._begin_again(ExchangeOutcome())  # of workers that were lost, which is told
    assert caplog.messages == ["no answer of csd1 within 60 s: round 3 begins again"]
    assert began == [3, 3]
