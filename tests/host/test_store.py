# SPDX-License-Identifier: Apache-2.0
"""The job store: a recorded event has happened, and survives a restart."""

from __future__ import annotations

import dataclasses
import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.host.records.jobs import JobEvent, JobPlan, JobState, Round, Standing
from millpond.host.store.store import Store
from millpond.train.job.spec import DataSpec, Job, ModelSpec

from ..job_files import described
from .stored import jobs_of

JOB = Job("digits", DataSpec("private/x", "/test"), ModelSpec("m:build", ("m.py",), arguments={"width": 3}))
FILES = described({"m.py": "def build(width): ...\n"})
ROUND = Round(
    1,
    {"host": {"accuracy": 0.5, "loss": 1.25}},
    2.0,
    10,
    {"csd0": 10},
    {"csd1": "gone"},
    {"csd0": (1, 2), "csd1": (0, 0)},
    {},
    {},
    {"training_loss": 0.5},
    {"csd0": {"share": 1.0}},
    (JobEvent(1.5, "lost", "csd1", "gone"),),
)
METERED = dataclasses.replace(ROUND, joules={"csd0": 13.2}, energy={"csd0": "declared", "csd1": "unknown"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fleet.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = Store(path)
    yield opened
    opened.close()


def test_a_job_is_what_was_submitted(store: Store) -> None:
    number = store.add_job(JOB, FILES)
    (row,) = jobs_of(store)
    assert (row.id, row.job, row.files, row.state) == (number, JOB, FILES, JobState.QUEUED)
    assert (row.plan, row.model, row.error, row.ended) == (None, "", "", None)
    assert row.created > 0


def test_numbers_are_never_used_again(store: Store) -> None:
    assert [store.add_job(JOB, {}) for _ in range(3)] == [1, 2, 3]
    store.end_job(2, JobState.FAILED, error="no data")
    assert [(row.id, row.state, row.error) for row in jobs_of(store)][1] == (2, JobState.FAILED, "no data")
    assert jobs_of(store)[1].ended is not None


def test_everything_survives_a_restart(path: Path) -> None:
    first = Store(path)
    number = first.add_job(JOB, FILES)
    first.set_plan(number, JobPlan(("csd0", "csd1")))
    first.add_round(number, ROUND)
    first.saw_device("csd0", "boot", "0.1")
    first.saw_device("csd0", "boot2", "0.1")
    first.close()
    second = Store(path)
    (row,) = jobs_of(second)
    assert row.plan == JobPlan(("csd0", "csd1"))
    assert second.rounds(number) == [ROUND]
    second.close()


def test_rounds_are_in_order_and_of_their_job(store: Store) -> None:
    one, two = store.add_job(JOB, {}), store.add_job(JOB, {})
    for number in (3, 1, 2):
        store.add_round(one, dataclasses.replace(ROUND, round=number))
    assert [result.round for result in store.rounds(one)] == [1, 2, 3]
    assert store.rounds(two) == []
    assert store.last_rounds(two, 1) == [] and store.scores(two) == []
    scores: dict[str, dict[str, float | None]] = {"devices": {"loss": None}}
    store.add_round(one, dataclasses.replace(ROUND, round=3, scores=scores))
    assert [result.scores for result in store.rounds(one)] == [ROUND.scores, ROUND.scores, scores]
    assert store.scores(one) == [(1, ROUND.scores), (2, ROUND.scores), (3, scores)]
    assert [result.round for result in store.rounds(one, after=1)] == [2, 3]
    (last,) = store.last_rounds(one, 1)
    assert last is not None and last.round == 3
    store.add_round(two, ROUND)
    store.drop_rounds(one, 2)
    assert [len(store.rounds(each)) for each in (one, two)] == [1, 1]


def test_the_standing_of_a_job_is_that_of_its_last_round(store: Store) -> None:
    number = store.add_job(JOB, {})
    first, second = Standing("loss", 1.0, 1.0, 1), Standing("loss", 2.0, 1.0, 1)

    def standing() -> Standing | None:
        row = store.job(number)
        assert row
        return row.standing

    assert standing() is None
    store.add_round(number, ROUND, first)
    store.set_standing(number, second)
    assert standing() == first, "one that is stored was taken from older rounds"
    store.add_round(number, dataclasses.replace(ROUND, round=2), second)
    assert standing() == second
    store.drop_rounds(number, 3)
    assert standing() == second
    store.drop_rounds(number, 2)
    assert standing() is None
    store.set_standing(number, first)
    assert standing() == first


def test_jobs_end_in_an_order_that_no_clock_changes(path: Path) -> None:
    store = Store(path)
    for _ in range(4):
        store.add_job(JOB, {})
    for number in (3, 1, 2):
        store.end_job(number, JobState.DONE)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE jobs SET ended = -ended")
    db.close()

    def order() -> list[int]:
        return [job.id for job in sorted(store.ended(), key=lambda job: job.ended_as)]

    assert order() == [3, 1, 2]
    store.end_job(4, JobState.DONE)
    assert order() == [3, 1, 2, 4]
    store.close()


def test_a_pruned_job_has_no_model_and_its_files_are_of_no_use(store: Store) -> None:
    for _ in range(2):
        store.end_job(store.add_job(JOB, FILES), JobState.DONE, model="model.safetensors")
    assert store.digests() == {file.sha256 for file in FILES.values()}
    for number in (1, 2):
        store.prune_job(number)
    rows = jobs_of(store)
    assert [(row.model, row.state) for row in rows] == [("", JobState.DONE)] * 2
    assert all(row.pruned and row.files == FILES for row in rows)
    assert store.digests() == set()


def test_a_round_of_no_job_is_refused_or_of_no_consequence(store: Store) -> None:
    assert store.rounds(99) == []


def test_many_threads_may_write(store: Store) -> None:
    number = store.add_job(JOB, {})

    def write(first: int) -> None:
        for offset in range(10):
            store.add_round(number, dataclasses.replace(ROUND, round=first + offset))

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.rounds(number)) == 40


def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    number = store.add_job(JOB, {})
    with pytest.raises(LocalError, match="NOT NULL"):
        store.add_round(number, dataclasses.replace(ROUND, round=None))  # type: ignore[arg-type]
    assert store.rounds(number) == []
    store.add_round(number, ROUND)


def test_only_its_owner_reads_it(store: Store, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.expected_log(r"there are no jobs: .*fleet\.db")
def test_a_file_that_is_no_database_stays_as_it_is_and_is_named(path: Path) -> None:
    text = "this is no database, whatever its name says" * 100
    path.write_text(text)
    store = Store(path)
    assert "fleet.db" in store.fault
    with pytest.raises(LocalError, match=r"fleet\.db"):
        store.add_job(JOB, {})
    assert path.read_text() == text
