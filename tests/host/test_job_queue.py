# SPDX-License-Identifier: Apache-2.0
"""The queue of jobs: the decision alone, in a daemon whose jobs train nothing, and lacks that pass."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.base.errors import LocalError, Refused, RemoteError
from millpond.host.jobs import service
from millpond.host.jobs.context import JobFailed
from millpond.host.jobs.queue import QueuedJob, decide
from millpond.host.jobs.shortages import is_lack
from millpond.host.records.jobs import JobState
from millpond.host.store.store import Store
from millpond.train.job.spec import DataSpec, Job, ModelSpec

from ..waiting import eventually
from .daemon_rig import Rig
from .stored import jobs_of


def job(number: int, devices: str, priority: int = 0) -> QueuedJob:
    return QueuedJob(number, priority, frozenset(devices))


@pytest.mark.parametrize(
    ("running", "queued", "begin", "waits"),
    [
        ({}, [], (), {}),
        ({}, [job(2, "ab"), job(1, "ab")], (1,), {2: (1,)}),
        ({}, [job(1, "ab"), job(2, "cd")], (1, 2), {}),
        ({1: "ab"}, [job(2, "bc"), job(3, "d")], (3,), {2: (1,)}),
        ({1: "a", 2: "b"}, [job(3, "ab")], (), {3: (1, 2)}),
        ({1: "a"}, [job(2, "a"), job(3, "a", 1), job(4, "a", 1)], (), {3: (1,), 4: (3,), 2: (4,)}),
        ({1: "a"}, [job(2, "ab"), job(3, "b")], (), {2: (1,), 3: (2,)}),
        ({1: "a"}, [job(2, "ab"), job(3, "b", 1)], (3,), {2: (1, 3)}),
        ({1: "a"}, [job(2, "ab", -1), job(3, "b")], (3,), {2: (1, 3)}),
        ({1: ""}, [job(2, ""), job(3, "a")], (2, 3), {}),
    ],
)
def test_which_jobs_begin_and_which_wait_for_others(
    running: dict[int, str],
    queued: list[QueuedJob],
    begin: tuple[int, ...],
    waits: dict[int, tuple[int, ...]],
) -> None:
    devices = {number: frozenset(names) for number, names in running.items()}
    for order in itertools.permutations(queued):
        decision = decide(devices, order)
        assert (decision.begin, decision.waits) == (begin, waits)


def test_a_job_begins_with_the_model_of_another(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the rig's models have a relative path
    (tmp_path / "model.safetensors").write_bytes(b"values")
    rig.submit()
    rig.wait_for(1, "running")
    for number, text in ((1, "model: initial: job 1 has no model yet"), (7, "there is no job 7")):
        code, _, err = rig.command("train", str(rig.write_job("own")), "--set", f"model.initial={number}")
        assert code != 0 and text in err
    rig.finish(1)
    second = rig.submit("--set", "model.initial=1")
    row = jobs_of(rig.store)[second - 1]
    assert row.job.code.initial == "initial.safetensors"
    assert row.files["initial.safetensors"].sha256 == hashlib.sha256(b"values").hexdigest()


@pytest.mark.parametrize("seed", range(20))
def test_jobs_that_run_share_no_device_and_all_run_in_the_end(seed: int) -> None:
    draw = random.Random(seed)
    queued = [
        job(number, "".join(draw.sample("abcd", draw.randint(1, 3))), draw.randint(-1, 1))
        for number in range(1, 12)
    ]
    running: dict[int, frozenset[str]] = {}
    ended: list[int] = []
    while queued or running:
        decision = decide(running, queued)
        running |= {each.id: each.devices for each in queued if each.id in decision.begin}
        queued = [each for each in queued if each.id not in decision.begin]
        assert {each.id for each in queued} == decision.waits.keys()
        taken = [name for devices in running.values() for name in devices]
        assert len(taken) == len(set(taken))
        assert running, "nothing runs, and jobs wait"
        ended.append(draw.choice(sorted(running)))
        del running[ended[-1]]
    assert sorted(ended) == list(range(1, 12))


def test_jobs_take_turns_by_priority_and_age(rig: Rig) -> None:
    assert [rig.submit() for _ in range(3)] == [1, 2, 3]
    assert rig.submit("--priority", "5") == 4
    assert rig.states == ["running", "waits for job 4", "waits for job 2", "waits for job 1"]
    assert rig.command("jobs")[1].count("queued") == 3 and "waits for job 4" in rig.command("jobs")[1]
    for number in (1, 4, 2, 3):
        assert rig.info(number).state == "running"
        rig.finish(number)
        following = {1: 4, 4: 2, 2: 3}.get(number)
        if following:
            rig.wait_for(following, "running")
    assert rig.states == ["done"] * 4


def test_a_job_has_the_devices_that_it_names_and_no_others(rig: Rig) -> None:
    assert rig.submit("--devices", "csd2,csd0") == 1
    assert rig.submit(text='devices = ["csd1"]') == 2
    assert rig.submit("--devices", "csd1") == 3
    assert rig.states == ["running", "running", "waits for job 2"]
    assert [list(rig.begun[number].context.devices) for number in (1, 2)] == [["csd0", "csd2"], ["csd1"]]
    found = json.loads(rig.command("jobs", "--format", "json")[1])["jobs"]
    assert [(each["devices"], each["priority"], each["reason"]) for each in found] == [
        (["csd2", "csd0"], 0, ""),
        (["csd1"], 0, ""),
        (["csd1"], 0, "waits for job 2"),
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--devices", "csd0,csd9"), "there is no device 'csd9'; the fleet has csd0, csd1, csd2"),
        (("--devices", ","), "',' names no device"),
        (("--set", 'devices=["csd0", "csd0"]'), "job.toml with --set: devices: 'csd0' is named twice"),
        (("--set", "priority=high"), "job.toml with --set: priority: expected a whole number"),
    ],
)
def test_a_wrong_option_is_refused_and_no_job_is_queued(
    rig: Rig, arguments: tuple[str, ...], error: str
) -> None:
    code, _, err = rig.command("train", str(rig.write_job("job")), *arguments)
    assert code == 2 and error in err and err.count("\n") == 1
    assert jobs_of(rig.store) == []


def test_a_queued_job_is_stopped_and_holds_nobody_up(rig: Rig) -> None:
    rig.submit("--devices", "csd0")
    rig.submit()
    rig.submit("--devices", "csd1")
    assert rig.states == ["running", "waits for job 1", "waits for job 2"]
    assert rig.command("stop", "2")[0] == 0
    assert rig.states == ["running", "stopped", "running"]
    code, _, err = rig.command("stop", "2")
    assert code == 2 and "job 2 is not running" in err
    assert rig.command("logs", "2") == (0, "\n", "")
    assert rig.command("resume", "2", "--detach") == (
        0,
        "job 2 is queued: waits for jobs 1, 3; 'millpond jobs' and 'millpond logs 2' tell more\n",
        "",
    )
    assert "job 2 is queued" in rig.command("resume", "2")[2]


def test_many_jobs_come_and_are_stopped_at_once(rig: Rig) -> None:
    spec = Job("many", DataSpec("private/x", "/test"), ModelSpec("m:build"))

    def come_and_go(devices: tuple[str, ...]) -> None:
        for _ in range(8):
            rig.jobs.stop(rig.jobs.submit(replace(spec, devices=devices), {}))

    with ThreadPoolExecutor() as pool:
        list(pool.map(come_and_go, (("csd0",), ("csd0", "csd1"), ("csd1", "csd2"), ()), timeout=60))
    assert [row.state for row in jobs_of(rig.store)] == [JobState.STOPPED] * 32


def test_queued_jobs_survive_the_daemon(open_rig: Callable[[], Rig]) -> None:
    before = open_rig()
    before.submit()
    before.submit("--devices", "csd1")
    before.submit("--devices", "csd2", "--priority", "-1")
    after = open_rig()
    assert after.states == ["running", "waits for job 1", "waits for job 1"]
    after.finish(1)
    for number in (2, 3):
        after.wait_for(number, "running")


def test_the_end_of_a_job_is_told_once_to_who_follows_it(rig: Rig) -> None:
    for _ in range(2):
        rig.submit()
    rig.finish(1, "no data")
    rig.wait_for(2, "running")
    rig.jobs.stop(2)
    for number, last in ((1, "ERROR no data"), (2, "INFO stopped")):
        (answer,) = rig.jobs.follow(number, lambda: False)
        assert answer.progress.lines == ("begun with csd0, csd1, csd2",)
        assert rig.command("logs", str(number))[1].rstrip().endswith(last)


def test_a_stopped_job_logs_that_and_nothing_else(rig: Rig) -> None:
    rig.submit()
    assert rig.command("stop", "1")[0] == 0
    lines = [line.split(maxsplit=3)[3] for line in rig.command("logs", "1")[1].splitlines()]
    assert lines == ["begun with csd0, csd1, csd2", "stopped"]
    assert rig.info(1).error == ""


def test_of_several_resumptions_at_once_one_counts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.submit()
    rig.jobs.stop(1)
    together, restart = threading.Barrier(3), rig.store.restart_job

    def slowly(number: int, spec: Job) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.5)  # all of them, if nothing keeps them apart
        restart(number, spec)

    monkeypatch.setattr(rig.store, "restart_job", slowly)

    def resume(_: int) -> str:
        try:
            rig.jobs.restart(1, None)
        except Refused as error:
            return error.text
        return "resumed"

    with ThreadPoolExecutor() as pool:
        told = sorted(pool.map(resume, range(3), timeout=30))
    assert told[2] == "resumed"
    assert set(told[:2]) <= {"job 1 is queued", "job 1 is running"}


def test_a_job_does_not_go_back_to_fewer_rounds_than_it_has_done(rig: Rig) -> None:
    rig.submit()
    rig.add_round(1)
    rig.add_round(1, round=2)
    rig.finish(1)
    code, _, err = rig.command("resume", "1", "--rounds", "1", "--detach")
    assert (code, err) == (2, "millpond: job 1 has done 2 already, not 1\n")
    assert (rig.info(1).state, rig.info(1).rounds) == ("done", 20)
    assert rig.command("resume", "1", "--rounds", "3", "--detach")[0] == 0


def test_a_job_whose_device_is_gone_from_the_fleet_is_not_resumed(rig: Rig) -> None:
    rig.submit()
    rig.finish(1)
    rig.store.restart_job(1, replace(rig.jobs.record(1).job, devices=("csd0", "csd7")))
    rig.store.end_job(1, JobState.STOPPED)
    code, _, err = rig.command("resume", "1", "--detach")
    assert (code, err) == (2, "millpond: there is no device 'csd7'; the fleet has csd0, csd1, csd2\n")
    assert rig.info(1).state == "stopped"


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
