# SPDX-License-Identifier: Apache-2.0
"""Pure: rows of the fleet's database as jobs and rounds, and the faults of rows that are neither."""

from __future__ import annotations

import json
import sqlite3
from functools import lru_cache

from millpond.base import schema
from millpond.host.records.jobs import JobPlan, JobRow, JobState, Round, Standing, UnreadableJob
from millpond.host.records.stored_rounds import StoredRound, UnreadableRow, read_row
from millpond.train.job.files import JobFile
from millpond.train.job.spec import Job


def job_row(row: sqlite3.Row) -> JobRow:
    """Return a row as a job. Raises UnreadableRow."""
    return read_row(f"job {row['id']}", lambda: _job_row(row))


def round_row(row: sqlite3.Row) -> Round:
    """Return a row as a finished round. Raises UnreadableRow."""
    return stored_round(row).read(row["job"])


def stored_round(row: sqlite3.Row) -> StoredRound:
    """Return a row as a stored round, which nothing has read."""
    return StoredRound(row["round"], row["result"])


def unreadable(row: sqlite3.Row, error: UnreadableRow) -> UnreadableJob:
    """Return the readable part of a job whose row cannot be read."""
    return UnreadableJob(row["id"], row["name"], row["created"], row["ended"], str(error))


def _job_row(row: sqlite3.Row) -> JobRow:
    files = {
        name: schema.load(JobFile, file, f"job {row['id']}: {name}", strict=False)
        for name, file in json.loads(row["files"]).items()
    }
    return JobRow(
        id=row["id"],
        job=_job(row["job"], f"job {row['id']}"),
        files=files,
        plan=schema.load(JobPlan, json.loads(row["plan"]), "plan", strict=False) if row["plan"] else None,
        state=JobState(row["state"]),
        error=row["error"],
        model=row["model"],
        created=row["created"],
        ended=row["ended"],
        pruned=row["pruned"],
        owner=row["owner"],
        standing=_standing(row["standing"]),
    )


@lru_cache(maxsize=256)
def _job(text: str, where: str) -> Job:
    """Return a job's definition. A list of jobs is read again and again, and they seldom change."""
    return schema.load(Job, json.loads(text), where, strict=False)


def _standing(text: str) -> Standing | None:
    return schema.load(Standing, json.loads(text), "standing", strict=False) if text else None
