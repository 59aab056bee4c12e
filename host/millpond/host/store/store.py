# SPDX-License-Identifier: Apache-2.0
"""Edge (SQLite): the store of devices, jobs and rounds. A stored round is final."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from millpond.base import schema
from millpond.base.errors import ConfigError, LocalError
from millpond.host.records.jobs import (
    ACTIVE,
    EndedJob,
    JobPlan,
    JobRow,
    JobState,
    Round,
    Standing,
    UnreadableJob,
)
from millpond.host.records.stored_rounds import StoredRound, UnreadableRow
from millpond.host.store import tables
from millpond.host.store.rows import job_row, round_row, stored_round, unreadable
from millpond.train.balance.profiling import Profile
from millpond.train.job.files import JobFile
from millpond.train.job.spec import Job

log = logging.getLogger(__name__)
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Store:
    """The fleet's database. Safe to use from several threads. Methods raise LocalError, for example at a full
    disk; all do while there is a ``fault``.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        path.touch(mode=0o600)
        try:
            self._db, self.fault = tables.open_database(path)
        except sqlite3.OperationalError as error:
            raise LocalError(f"{path}: {error}") from None
        except sqlite3.DatabaseError as error:  # what is there is left as it is
            self._db, self.fault = sqlite3.connect(":memory:", check_same_thread=False), f"{path}: {error}"
        if self.fault:
            log.error("there are no jobs: %s", self.fault)
        self._told: set[int] = set()
        self._versions: Counter[int] = Counter()
        self._drops: Counter[int] = Counter()

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self.fault:
            raise LocalError(self.fault)
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
            if self._db.in_transaction:  # SQLite itself ends some at a full disk
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def version(self, job: int) -> int:
        """Return a number that differs once the rounds of a job do."""
        return self._versions[job]

    def drops(self, job: int) -> int:
        """Return how often rounds of a job were forgotten: until then a stored round is final."""
        return self._drops[job]

    def saw_device(self, name: str, boot: str, software: str) -> None:
        """Store that a device has answered, if there is room for that."""
        values = (name, boot, software, time.time())
        try:
            with self._transaction() as db:
                db.execute(
                    "INSERT OR REPLACE INTO devices (name, boot, software, seen) VALUES (?, ?, ?, ?)", values
                )
        except LocalError as error:
            log.warning("%s was seen, which cannot be stored: %s", name, error)

    def add_job(self, job: Job, files: dict[str, JobFile], owner: int | None = None) -> int:
        """Store a new queued job of the user with the uid ``owner``; returns its number."""
        dumped = (json.dumps(schema.dump(each)) for each in (job, files))
        with self._transaction() as db:
            cursor = db.execute(
                "INSERT INTO jobs (name, job, files, state, created, owner) VALUES (?, ?, ?, ?, ?, ?)",
                (job.name, *dumped, JobState.QUEUED, time.time(), owner),
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
        """Store how a job ended, as the last of all."""
        with self._transaction() as db:
            db.execute(
                "UPDATE jobs SET state = ?, error = ?, model = ?, ended = ?, "
                "ended_as = (SELECT max(ended_as) + 1 FROM jobs) WHERE id = ?",
                (state, error, model, time.time(), number),
            )

    def restart_job(self, number: int, job: Job) -> None:
        """Store that an ended job is queued again, as ``job`` says now."""
        with self._transaction() as db:
            db.execute(
                "UPDATE jobs SET job = ?, state = ?, error = '', model = '', ended = NULL WHERE id = ?",
                (json.dumps(schema.dump(job)), JobState.QUEUED, number),
            )

    def prune_job(self, number: int) -> None:
        """Store that the files of an ended job are gone, its model among them."""
        with self._transaction() as db:
            db.execute("UPDATE jobs SET pruned = ?, model = '' WHERE id = ?", (time.time(), number))

    def forget_job(self, number: int) -> None:
        """Remove a job with its rounds. Its number is not used again."""
        with self._transaction() as db:
            db.execute("DELETE FROM results WHERE job = ?", (number,))
            db.execute("DELETE FROM jobs WHERE id = ?", (number,))

    def active(self) -> list[JobRow]:
        """Return the jobs that have not ended and can be read, oldest first."""
        found = self._jobs("SELECT * FROM jobs WHERE state IN (?, ?) ORDER BY id", *sorted(ACTIVE))
        return [job for job in found if isinstance(job, JobRow)]

    def newest(self, most: int, before: int) -> list[JobRow | UnreadableJob]:
        """Return the newest ``most`` jobs with numbers below ``before``, oldest first."""
        return self._jobs("SELECT * FROM jobs WHERE id < ? ORDER BY id DESC LIMIT ?", before, most)[::-1]

    def _jobs(self, query: str, *values: object) -> list[JobRow | UnreadableJob]:
        with self._transaction() as db:
            return [self._job(row) for row in db.execute(query, values)]

    def ended(self) -> list[EndedJob]:
        """Return the jobs that have ended."""
        query = "SELECT id, name, ended, created, ended_as, pruned FROM jobs WHERE state NOT IN (?, ?)"
        with self._transaction() as db:
            return [
                EndedJob(
                    row["id"],
                    row["name"],
                    row["ended"] or row["created"],
                    row["ended_as"],
                    pruned=row["pruned"] is not None,
                )
                for row in db.execute(query, sorted(ACTIVE))
            ]

    def _job(self, row: sqlite3.Row) -> JobRow | UnreadableJob:
        try:
            return job_row(row)
        except UnreadableRow as error:
            if row["id"] not in self._told:
                self._told.add(row["id"])
                log.error("%s", error)
            return unreadable(row, error)

    def digests(self) -> set[str]:
        """Return the digests of the files and of the test data of all jobs that are not pruned, also of those
        that cannot be read.
        """
        with self._transaction() as db:
            found = db.execute("SELECT files, job FROM jobs WHERE pruned IS NULL").fetchall()
        return {digest for row in found for text in row for digest in _DIGEST.findall(text)}

    def job(self, number: int) -> JobRow | None:
        """Return one job, None for an unknown number. Raises UnreadableRow."""
        with self._transaction() as db:
            row = db.execute("SELECT * FROM jobs WHERE id = ?", (number,)).fetchone()
            return job_row(row) if row else None

    def add_round(self, job: int, result: Round, standing: Standing | None = None) -> None:
        """Store a finished round, and the job's standing after it. From here on the job resumes after it."""
        values = (job, result.round, json.dumps(schema.dump(result)))
        with self._transaction() as db:
            self._versions[job] += 1
            db.execute("INSERT OR REPLACE INTO results (job, round, result) VALUES (?, ?, ?)", values)
            db.execute("UPDATE jobs SET standing = ? WHERE id = ?", (_text_of(standing), job))

    def drop_rounds(self, job: int, first: int) -> None:
        """Forget the rounds of a job from ``first`` on: it is about to compute them again."""
        with self._transaction() as db:
            self._versions[job] += 1
            self._drops[job] += 1
            if db.execute("DELETE FROM results WHERE job = ? AND round >= ?", (job, first)).rowcount:
                db.execute("UPDATE jobs SET standing = '' WHERE id = ?", (job,))

    def set_standing(self, job: int, standing: Standing) -> None:
        """Store a job's standing as it follows from its rounds, unless it has one meanwhile."""
        with self._transaction() as db:
            db.execute(
                "UPDATE jobs SET standing = ? WHERE id = ? AND standing = ''", (_text_of(standing), job)
            )

    def set_profile(self, work: str, profile: Profile) -> None:
        """Store the profile of a worker for some ``work`` (a fingerprint)."""
        with self._transaction() as db:
            values = (profile.worker, work, json.dumps(schema.dump(profile)))
            db.execute("INSERT OR REPLACE INTO profiles (worker, work, profile) VALUES (?, ?, ?)", values)

    def profile(self, worker: str, work: str) -> Profile | None:
        """Return the stored profile of a worker for some ``work``, None without one that can be read."""
        with self._transaction() as db:
            query = "SELECT profile FROM profiles WHERE worker = ? AND work = ?"
            row = db.execute(query, (worker, work)).fetchone()
            with contextlib.suppress(ValueError, ConfigError, RecursionError):  # it is measured again
                return (
                    schema.load(Profile, json.loads(row["profile"]), "profile", strict=False) if row else None
                )
        return None

    def rounds(self, job: int, after: int = -1) -> list[Round]:
        """Return the finished rounds of a job behind round ``after``, in order. Raises UnreadableRow."""
        return [each.read(job) for each in self.stored_rounds(job, after)]

    def stored_rounds(self, job: int, after: int = -1, size: float = math.inf) -> list[StoredRound]:
        """Return the finished rounds of a job behind round ``after``, in order: the first ones whose texts
        have ``size`` characters together, or all. They are not read.
        """
        found, query = list[StoredRound](), "SELECT * FROM results WHERE job = ? AND round > ? ORDER BY round"
        with self._transaction() as db:
            for row in db.execute(query, (job, after)):
                found.append(stored_round(row))
                if (size := size - len(row["result"])) <= 0:
                    break
        return found

    def scores(self, job: int) -> list[tuple[int, dict[str, dict[str, float | None]]]]:
        """Return the scores of a job's finished rounds with their numbers, in order."""
        with self._transaction() as db:
            query = "SELECT round, json_extract(result, '$.scores') AS scores FROM results WHERE job = ?"
            rows = db.execute(f"{query} ORDER BY round", (job,))
            return [(row["round"], json.loads(row["scores"])) for row in rows]

    def last_rounds(self, job: int, most: int) -> list[Round]:
        """Return the last ``most`` finished rounds of a job, in order."""
        with self._transaction() as db:
            query = "SELECT * FROM results WHERE job = ? ORDER BY round DESC LIMIT ?"
            return [round_row(row) for row in db.execute(query, (job, most))][::-1]


def _text_of(standing: Standing | None) -> str:
    return json.dumps(schema.dump(standing)) if standing else ""
