# SPDX-License-Identifier: Apache-2.0
"""Edge (SQLite): the store of devices, jobs and rounds. A stored round is final."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from millpond.base import schema
from millpond.base.errors import LocalError
from millpond.host.model.jobs import JobPlan, JobRow, JobState, Round
from millpond.train.balance.profiling import Profile
from millpond.train.job.files import JobFile
from millpond.train.job.spec import Job

_SCHEMA = """
CREATE TABLE IF NOT EXISTS devices (
    name TEXT PRIMARY KEY, boot TEXT NOT NULL, software TEXT NOT NULL, seen REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, job TEXT NOT NULL, files TEXT NOT NULL,
    plan TEXT NOT NULL DEFAULT '', state TEXT NOT NULL, error TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL, ended REAL) STRICT;
CREATE TABLE IF NOT EXISTS results (
    job INTEGER NOT NULL REFERENCES jobs (id), round INTEGER NOT NULL, result TEXT NOT NULL,
    PRIMARY KEY (job, round)) STRICT;
CREATE TABLE IF NOT EXISTS profiles (
    worker TEXT NOT NULL, work TEXT NOT NULL, profile TEXT NOT NULL, PRIMARY KEY (worker, work)) STRICT;
"""
# Of version 1, whose jobs had the text of their files, a target for each kind of job and an optimizer of the
# server with other keys, and whose rounds had one score, of accuracy and loss on the host.
_MIGRATION = """
BEGIN;
ALTER TABLE jobs RENAME code TO files;
UPDATE jobs SET files = '{}';
INSERT OR IGNORE INTO results SELECT job, round, json_set(detail, '$.round', round, '$.seconds', seconds,
    '$.samples', samples, '$.scores', json_object('host', json_object('accuracy', accuracy, 'loss', loss)))
    FROM rounds;
DROP TABLE rounds;
UPDATE jobs SET job = json_set(job, '$.federated.server', json(json_remove(json_object(
        'name', job ->> '$.federated.server.optimizer',
        'learning_rate', job ->> '$.federated.server.learning_rate',
        'momentum', job ->> '$.federated.server.momentum'),
        iif(job ->> '$.federated.server.optimizer' = 'adam', '$.momentum', '$.none'))),
    '$.evaluate', json_object('target',
        iif(job ->> '$.synchronous' IS NULL, job ->> '$.federated.target', job ->> '$.synchronous.target')));
UPDATE jobs SET job = json_remove(job, '$.federated') WHERE job ->> '$.synchronous' IS NOT NULL;
PRAGMA user_version = 2;
COMMIT;
"""
# Of version 2, whose jobs had an optimizer of the server in place of a strategy.
_STRATEGIES = """
BEGIN;
UPDATE jobs SET job = json_set(json_remove(job, '$.federated.server'), '$.federated.strategy', json_object(
        'name', 'fedopt', 'learning_rate', coalesce(job ->> '$.federated.server.learning_rate', 1.0),
        'optimizer',
        json_remove(json_patch('{"name": "SGD"}', job -> '$.federated.server'), '$.learning_rate')))
    WHERE job -> '$.federated.server' IS NOT NULL;
PRAGMA user_version = 3;
COMMIT;
"""
_VERSION = 3


class Store:
    """The fleet's database. Safe to use from several threads. Methods raise LocalError, for example at a full
    disk.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        path.touch(mode=0o600)
        try:
            self._db = _open(path)
        except sqlite3.Error as error:
            raise LocalError(f"{path}: {error}") from None

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                with self._begun():
                    yield self._db
            except sqlite3.Error as error:
                raise LocalError(f"the fleet's database: {error}") from error

    @contextlib.contextmanager
    def _begun(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def saw_device(self, name: str, boot: str, software: str) -> None:
        """Store that a device has answered."""
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO devices VALUES (?, ?, ?, ?)", (name, boot, software, time.time())
            )

    def add_job(self, job: Job, files: dict[str, JobFile]) -> int:
        """Store a new queued job; returns its number."""
        dumped = (json.dumps(schema.dump(each)) for each in (job, files))
        with self._transaction() as db:
            cursor = db.execute(
                "INSERT INTO jobs (name, job, files, state, created) VALUES (?, ?, ?, ?, ?)",
                (job.name, *dumped, JobState.QUEUED, time.time()),
            )
            return int(cursor.lastrowid or 0)

    def set_plan(self, number: int, plan: JobPlan) -> None:
        """Store the plan that a job keeps when it resumes."""
        with self._transaction() as db:
            db.execute("UPDATE jobs SET plan = ? WHERE id = ?", (json.dumps(schema.dump(plan)), number))

    def begin_job(self, number: int) -> None:
        """Store that a queued job runs."""
        with self._transaction() as db:
            db.execute("UPDATE jobs SET state = ? WHERE id = ?", (JobState.RUNNING, number))

    def end_job(self, number: int, state: JobState, *, error: str = "", model: str = "") -> None:
        """Store how a job ended."""
        with self._transaction() as db:
            db.execute(
                "UPDATE jobs SET state = ?, error = ?, model = ?, ended = ? WHERE id = ?",
                (state, error, model, time.time(), number),
            )

    def restart_job(self, number: int, job: Job) -> None:
        """Store that an ended job is queued again, as ``job`` says now."""
        with self._transaction() as db:
            db.execute(
                "UPDATE jobs SET job = ?, state = ?, error = '', model = '', ended = NULL WHERE id = ?",
                (json.dumps(schema.dump(job)), JobState.QUEUED, number),
            )

    def jobs(self) -> list[JobRow]:
        """Return all jobs, oldest first."""
        with self._transaction() as db:
            return [_job_row(row) for row in db.execute("SELECT * FROM jobs ORDER BY id")]

    def job(self, number: int) -> JobRow | None:
        """Return one job, None for an unknown number."""
        with self._transaction() as db:
            row = db.execute("SELECT * FROM jobs WHERE id = ?", (number,)).fetchone()
            return _job_row(row) if row else None

    def add_round(self, job: int, result: Round) -> None:
        """Store a finished round. From here on the job resumes after it."""
        values = (job, result.round, json.dumps(schema.dump(result)))
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", values)

    def set_profile(self, work: str, profile: Profile) -> None:
        """Store the profile of a worker for some ``work`` (a fingerprint)."""
        with self._transaction() as db:
            values = (profile.worker, work, json.dumps(schema.dump(profile)))
            db.execute("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?)", values)

    def profile(self, worker: str, work: str) -> Profile | None:
        """Return the stored profile of a worker for some ``work``, None without one."""
        with self._transaction() as db:
            query = "SELECT profile FROM profiles WHERE worker = ? AND work = ?"
            row = db.execute(query, (worker, work)).fetchone()
            return schema.load(Profile, json.loads(row["profile"]), "profile", strict=False) if row else None

    def rounds(self, job: int, after: int = -1) -> list[Round]:
        """Return the finished rounds of a job behind round ``after``, in order."""
        with self._transaction() as db:
            query = "SELECT * FROM results WHERE job = ? AND round > ? ORDER BY round"
            return [_round(row) for row in db.execute(query, (job, after))]

    def scores(self, job: int) -> list[tuple[int, dict[str, dict[str, float | None]]]]:
        """Return the scores of a job's finished rounds with their numbers, in order."""
        with self._transaction() as db:
            query = "SELECT round, json_extract(result, '$.scores') AS scores FROM results WHERE job = ?"
            rows = db.execute(f"{query} ORDER BY round", (job,))
            return [(row["round"], json.loads(row["scores"])) for row in rows]

    def last_round(self, job: int) -> Round | None:
        """Return the last finished round of a job, None without one."""
        with self._transaction() as db:
            query = "SELECT * FROM results WHERE job = ? ORDER BY round DESC LIMIT 1"
            row = db.execute(query, (job,)).fetchone()
            return _round(row) if row else None


def _open(path: Path) -> sqlite3.Connection:
    """Open the database at ``path``, made if need be. Raises sqlite3.Error, and leaves nothing open. Jobs of
    version 1 lose their files, whose texts were in their rows.
    """
    with contextlib.ExitStack() as unless_it_opens:
        database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        unless_it_opens.callback(database.close)
        database.row_factory = sqlite3.Row
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        version = database.execute("PRAGMA user_version").fetchone()[0]
        database.executescript(_SCHEMA)
        if version == 1:
            database.executescript(_MIGRATION)
        if version in (1, 2):
            database.executescript(_STRATEGIES)
        database.execute(f"PRAGMA user_version = {_VERSION}")
        unless_it_opens.pop_all()
    return database


def _job_row(row: sqlite3.Row) -> JobRow:
    files = {
        name: schema.load(JobFile, file, f"job {row['id']}: {name}", strict=False)
        for name, file in json.loads(row["files"]).items()
    }
    return JobRow(
        id=row["id"],
        job=schema.load(Job, json.loads(row["job"]), f"job {row['id']}", strict=False),
        files=files,
        plan=schema.load(JobPlan, json.loads(row["plan"]), "plan", strict=False) if row["plan"] else None,
        state=JobState(row["state"]),
        error=row["error"],
        model=row["model"],
        created=row["created"],
        ended=row["ended"],
    )


def _round(row: sqlite3.Row) -> Round:
    return schema.load(Round, json.loads(row["result"]), "round", strict=False)
