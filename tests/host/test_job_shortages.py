# SPDX-License-Identifier: Apache-2.0
"""A lack of something on the host ends no job: it waits, and goes on from its last checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from pathlib import Path

import pytest

from millpond.base.errors import LocalError, RemoteError
from millpond.host.jobs import service
from millpond.host.jobs.context import JobFailed
from millpond.host.jobs.shortages import is_lack
from millpond.host.store.store import Store

from ..waiting import eventually
from .daemon_rig import Rig, open_rig, rig

__all__ = ["open_rig", "rig"]


def told_from(cause: Exception) -> LocalError:
    """Return an error of ours whose cause is told by no more than its text."""
    try:
        try:
            raise cause
        except (OSError, sqlite3.Error) as error:
            raise LocalError(str(error)) from None
    except LocalError as error:
        return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (told_from(OSError(errno.EMFILE, "files")), True),
        (RuntimeError("can't start new thread"), True),
        (told_from(OSError(errno.EACCES, "denied")), False),
        (JobFailed("fewer than 2 devices take part"), False),
        (RemoteError("csd0: No space left on device"), False),
        (RuntimeError("another"), False),
    ],
)
def test_what_passes(error: Exception, passes: bool) -> None:
    assert is_lack(error) == passes


def test_a_database_that_another_process_has_locked_is_a_lack(tmp_path: Path) -> None:
    store = Store(tmp_path / "fleet.db")
    store._db.execute("PRAGMA busy_timeout = 10")
    with contextlib.closing(sqlite3.connect(tmp_path / "fleet.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LocalError, match="locked") as caught:
            store.prune_job(1)
        assert is_lack(caught.value)
    store.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STORE_RETRY_SECONDS", 0.2)


def test_a_running_job_waits_and_goes_on(rig: Rig) -> None:
    rig.submit()
    rig.wait_for(1, "running")
    first = rig.begun[1]
    first.failure = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    first.end.set()
    eventually(lambda: rig.begun[1] is not first, "it goes on", 20, 0.01)
    assert rig.info(1).state == "running" and rig.info(1).reason == ""
    rig.finish(1)
    assert "the job waits, and goes on from its last checkpoint: [Errno 24]" in rig.command("logs", "1")[1]


def test_a_job_that_waits_says_why_and_can_be_stopped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STORE_RETRY_SECONDS", 60.0)
    rig.submit()
    rig.wait_for(1, "running")
    rig.begun[1].failure = told_from(OSError(errno.ENOSPC, "No space left on device"))
    rig.begun[1].end.set()
    eventually(lambda: rig.info(1).reason != "", "it waits", 20, 0.01)
    assert rig.info(1).reason == "waits: [Errno 28] No space left on device"
    assert rig.command("stop", "1")[0] == 0
    assert rig.info(1).state == "stopped"


@pytest.mark.expected_log(r"queued jobs cannot begin: job 1 cannot begin yet: .*Too many open files")
def test_a_job_that_cannot_begin_for_a_lack_stays_queued(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    made, opened = [], service.JobLog

    def fail_once(*arguments: object) -> service.JobLog:
        made.append(arguments)
        if len(made) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(service, "JobLog", fail_once)
    rig.submit()
    rig.wait_for(1, "running")
    rig.finish(1)
