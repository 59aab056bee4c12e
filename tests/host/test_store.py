# SPDX-License-Identifier: Apache-2.0
"""The job store: a recorded event survives a restart, and damage costs one job, not the daemon."""

from __future__ import annotations

import dataclasses
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.daemon import main as daemon
from millpond.host.fleet import directory
from millpond.host.records.jobs import JobEvent, JobPlan, JobState, Round, Standing
from millpond.host.store.store import Store
from millpond.linux.syscalls import mount
from millpond.train.job.spec import DataSpec, Job, ModelSpec

from ..conftest import InNamespace
from ..job_files import described
from ..waiting import eventually
from .daemon_rig import Rig
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


DAMAGE = {
    "a value of a newer version": (
        "UPDATE jobs SET job = json_set(job, '$.seed', 'lion')",
        "seed: expected a whole number",
    ),
    "no JSON": ("UPDATE jobs SET job = '{'", "Expecting property name"),
    "nesting without end": (
        "UPDATE jobs SET job = replace(hex(zeroblob(2500)), '00', '[[')",
        "nested too deeply",
    ),
    "another kind of value": ("UPDATE jobs SET job = '[]'", "expected a table"),
    "no state": ("UPDATE jobs SET state = 'dreaming'", "'dreaming' is not a valid JobState"),
    "files that are none": ("UPDATE jobs SET files = '[1]'", "job 2"),
}


def execute(path: Path, *statements: str) -> None:
    """Change the database behind the daemon's back."""
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def fill(path: Path) -> Path:
    """Fill a disk with one file."""
    with pytest.raises(OSError, match="No space left"), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return path


@pytest.mark.expected_log("job 2 cannot be read")
@pytest.mark.parametrize("damage", DAMAGE)
def test_one_job_that_cannot_be_read_leaves_all_others(open_rig: Callable[[], Rig], damage: str) -> None:
    statement, why = DAMAGE[damage]
    before = open_rig()
    for devices in ("csd0", "csd1", "csd2"):
        before.submit("--devices", devices)
    before.finish(3)
    execute(before.directory / "fleet.db", f"{statement} WHERE id = 2")
    after = open_rig()
    assert [info.state for info in after.jobs.infos()] == ["running", "unreadable", "done"]
    assert why in after.info(2).error and "\n" not in after.info(2).error
    assert "unreadable" in after.command("jobs")[1]
    for command in (("logs", "2"), ("stop", "2"), ("resume", "2", "--detach"), ("jobs", "compare", "2")):
        code, _, err = after.command(*command)
        assert code == 2 and err.startswith("millpond: job 2 cannot be read: ") and err.count("\n") == 1
    after.finish(1)
    with pytest.raises(LocalError, match="job 2 cannot be read"):
        after.store.job(2)


@pytest.mark.expected_log("job 1 cannot be read")
def test_the_files_of_a_job_that_cannot_be_read_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "fleet.db")
    store.add_job(JOB, FILES)
    execute(tmp_path / "fleet.db", "UPDATE jobs SET job = '{'")
    assert store.digests() == {file.sha256 for file in FILES.values()}
    store.close()


@pytest.mark.expected_log("round 2 of job 1 cannot be read")
def test_a_round_that_cannot_be_read_is_named(open_rig: Callable[[], Rig]) -> None:
    rig = open_rig()
    rig.submit()
    for number in (1, 2):
        rig.add_round(1, round=number)
    rig.finish(1)
    execute(rig.directory / "fleet.db", "UPDATE results SET result = '{' WHERE round = 2")
    rig = open_rig()
    assert (rig.info(1).state, rig.info(1).round) == ("done", 0)
    assert "round 2 of job 1 cannot be read: " in rig.info(1).error
    assert "round 2 of job 1 cannot be read" in rig.command("jobs", "compare", "1")[2]


@pytest.mark.expected_log("its tables are of version")
@pytest.mark.parametrize("version", [4, 99])
def test_with_tables_of_another_version_the_daemon_starts_without_jobs(
    open_rig: Callable[[], Rig], version: int
) -> None:
    rig = open_rig()
    rig.submit()
    execute(rig.directory / "fleet.db", f"PRAGMA user_version = {version}")
    rig = open_rig()
    for command in (("jobs",), ("train", str(rig.write_job("again")), "--detach")):
        code, _, err = rig.command(*command)
        assert code == 2 and err.count("\n") == 1
        assert f"fleet.db: its tables are of version {version}, and this millpond has version" in err


@pytest.mark.expected_log("there are no jobs: .*not a database")
def test_the_daemon_starts_beside_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    path.write_bytes(b"torn by a power cut " * 1000)
    store = Store(path)
    try:
        assert "file is not a database" in store.fault
        with pytest.raises(LocalError, match="not a database"):
            jobs_of(store)
    finally:
        store.close()
    assert path.read_bytes() == b"torn by a power cut " * 1000


@pytest.mark.expected_log("No space left|disk is full|disk I/O error|queued jobs cannot begin|unable to open")
def test_the_daemon_starts_on_a_full_disk_and_goes_on_when_there_is_room(
    tmp_path: Path, in_namespace: InNamespace
) -> None:
    def body() -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        mount("none", disk, "tmpfs", data="size=1m")
        (disk / "fleet.toml").write_text('name = "full"\n')
        store = Store(disk / "fleet.db")
        for _ in range(3):
            store.add_job(JOB, FILES)
        store.begin_job(1)
        store.close()
        filling = fill(disk / "filling")
        with daemon.running(directory.read(disk)), DaemonClient(disk) as client:
            assert [job.id for job in client.jobs()] == [1, 2, 3]
            filling.unlink()
            eventually(lambda: {job.state for job in client.jobs()} == {"failed"}, "jobs go on", 60, 0.2)
            assert {job.error for job in client.jobs()} == {"no device is ready (the fleet is empty)"}

    in_namespace(body)


@pytest.mark.expected_log("csd0 was seen, which cannot be stored")
def test_a_device_is_ready_though_the_disk_is_full(tmp_path: Path, in_namespace: InNamespace) -> None:
    """The handshake with a device stores its boot and version."""

    def body() -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        mount("none", disk, "tmpfs", data="size=1m")
        store = Store(disk / "fleet.db")
        fill(disk / "filling")
        with pytest.raises(LocalError, match="full"):
            for _ in range(100):
                store.add_job(JOB, FILES)
        store.saw_device("csd0", "boot" * 9999, "0.1")
        store.close()

    in_namespace(body)
