# SPDX-License-Identifier: Apache-2.0
"""The list of many jobs, the following of long jobs, and the logs of jobs on a device."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from pathlib import Path

import pytest

from millpond.host.api.daemon import MOST_LISTED
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.jobs import job_log, service
from millpond.host.jobs.job_log import MOST_BYTES, MOST_LINES
from millpond.host.remote import job_log as remote_log

from .daemon_rig import Rig


def copy_job(rig: Rig, count: int) -> None:
    """Store copies of job 1 and its rounds, without its standing."""
    with sqlite3.connect(rig.directory / "fleet.db") as database:
        for number in range(2, count + 2):
            database.execute(
                "INSERT INTO jobs (id, name, job, files, state, created, ended) "
                "SELECT ?, name, job, files, state, created, ended FROM jobs WHERE id = 1",
                (number,),
            )
            database.execute(
                "INSERT INTO results SELECT ?, round, result FROM results WHERE job = 1", (number,)
            )
    database.close()


def test_a_list_of_many_jobs_is_read_page_by_page(rig: Rig) -> None:
    rig.submit()
    rig.wait_for(1, "running")
    rig.add_round(1)
    rig.finish(1)
    copy_job(rig, 2 * MOST_LISTED)
    with DaemonClient(rig.directory) as client:
        assert [job.id for job in client.jobs()] == list(range(MOST_LISTED + 2, 2 * MOST_LISTED + 2))
        every = client.jobs(10**6)
        assert [job.id for job in every] == list(range(1, 2 * MOST_LISTED + 2))
        assert {(job.round, job.score, job.best_round) for job in every} == {(1, 0.5, 1)}
    code, out, _ = rig.command("jobs", "--last", "3", "--format", "json")
    assert (code, [job["id"] for job in json.loads(out)["jobs"]]) == (0, [399, 400, 401])
    assert rig.command("jobs", "--last", "3")[1].endswith("the newest 3; --last N shows more\n")


def test_many_rounds_and_lines_come_in_parts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: a thousand rounds of 256 workers were one message, which is longer than a message may be."""
    monkeypatch.setattr(service, "PART_SIZE", 10_000)
    rig.submit()
    rig.wait_for(1, "running")
    for number in range(1, 201):
        rig.add_round(1, round=number)
    for number in range(MOST_LINES + 5):
        rig.begun[1].log.info("line %d", number)
    rig.finish(1)
    with DaemonClient(rig.directory) as client:
        found, again = list(client.watch(1)), list(client.watch(1))
        assert [each.round for each in client.job(1).rounds] == list(range(1, 201))
        assert client.job(1, rounds=False).rounds == ()
    assert [each.round for part in found for each in part.rounds] == list(range(1, 201)) and len(found) > 2
    assert [each.rounds for each in again] == [each.rounds for each in found]
    lines = [line for each in found for line in each.lines]
    assert len(lines) == MOST_LINES and lines[-1] == f"line {MOST_LINES + 4}"


def test_a_long_log_is_read_in_parts(rig: Rig) -> None:
    path = rig.directory / "long.log"
    lines = [f"{number} {'x' * 90}" for number in range(30000)]
    path.write_text("\n".join(lines) + "\nunfinished")
    found, _, more = job_log.read(path, 2, None)
    assert (found, more) == (tuple(lines[-2:]), True)
    every, position = [], 0
    while True:
        part, position, more = job_log.read(path, 0, position)
        every += part
        if not more:
            break
    assert every == lines
    path.write_bytes(b"y" * (MOST_BYTES + 10))
    (part,), position, more = job_log.read(path, 0, 0)
    assert (len(part), position, more) == (MOST_BYTES, MOST_BYTES, True)
    assert job_log.read(path, 0, position) == ((), MOST_BYTES, False)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ("--device", "csd0", "1"),
            "only root of csd0 can read that log: there it is /flash/private/.millpond-logs/a.b.",
        ),
        (("--device", "csd9", "1"), "no device 'csd9' in this fleet; it has csd0, csd1, csd2"),
        (("--device", "csd0", "99"), "there is no job 99"),
        (("--device", "csd0", "launch-a.py"), "there it is /flash/private/.millpond-logs/launch-a.py.log"),
        (("--device", "csd0", "transforms-a.py"), "/private/.millpond-logs/transforms-a.py.log"),
        (("--device", "csd0", "launch-/../a"), "'launch-/../a' is no job's number"),
        (
            ("--device", "csd0", "csd1"),
            "'csd1' is no job's number, such as in: millpond logs --device csd0 3",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(rig: Rig, arguments: tuple[str, ...], error: str) -> None:
    rig.submit("--set", "name=a.b")
    code, out, err = rig.command("logs", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and error in err


@pytest.mark.parametrize("config", ['name = "csd0"\nflash = "{}/own"\n[link]\n', ""])
def test_the_log_is_in_the_private_part_of_the_flash(tmp_path: Path, config: str) -> None:
    folder = tmp_path / ("own" if config else "usual") / "private" / ".millpond-logs"
    folder.mkdir(parents=True)
    (tmp_path / "agent.toml").write_text(config.format(tmp_path))
    script = remote_log._SCRIPT.format(
        config=tmp_path / "agent.toml",
        flash=tmp_path / "usual",
        name="'a b.log'",
        no_file=66,
        lines=2,
        follow="",
    )

    def run() -> tuple[int, str]:
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert run() == (66, "")
    (folder / "a b.log").write_text("1\n2\n3\n")
    assert run() == (0, "2\n3\n")
