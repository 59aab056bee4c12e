# SPDX-License-Identifier: Apache-2.0
"""The daemon starts, whatever has become of its database, and says which job cannot be read."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.daemon import main as daemon
from millpond.host.fleet import directory
from millpond.host.store.store import Store
from millpond.linux.syscalls import mount

from ..conftest import InNamespace
from ..waiting import eventually
from .daemon_rig import Rig, open_rig, rig
from .stored import jobs_of
from .test_store import FILES, JOB

__all__ = ["open_rig", "rig"]
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
