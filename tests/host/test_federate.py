# SPDX-License-Identifier: Apache-2.0
"""A Flower app is written from a job, and a fleet's resident job is found again, or begun anew."""

from __future__ import annotations

import signal
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millpond.base.errors import ConfigError, Refused
from millpond.flower.resident import ResidentJob
from millpond.host.api.outer import OuterAnswer, OuterModel
from millpond.host.cli.federation import project
from millpond.host.jobs.outer.mailbox import OuterMailbox
from millpond.train.job import file
from millpond.train.state.layout import Tensor

from ..waiting import eventually
from .commands import Command
from .daemon_rig import Rig, open_rig, rig

__all__ = ["open_rig", "rig"]
MODEL = OuterModel((Tensor("w", (2,), "float32"),), 1)
STATE = np.ones(2, np.float32)
JOB = """\
name = "mine"
data = { private = "private/x", test = "test" }
task = { factory = "task:Mine", files = ["task.py"] }
"""


def job_file(folder: Path, text: str = JOB) -> Path:
    """Write a job with its task and its test folder."""
    (folder / "test").mkdir(parents=True)
    (folder / "task.py").write_text("class Mine: ...\n")
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


def test_an_app_has_the_job_as_a_resident_one(tmp_path: Path, command: Command) -> None:
    source, folder = job_file(tmp_path / "job"), tmp_path / "app"
    code, out, err = command("federate", "new", folder, "--from", source, "--every", "3")
    assert (code, err) == (0, "") and "README.md says how it runs" in out
    job, files = file.read(folder / "job.toml")
    assert job.outer and job.outer.every == 3 and files == {"task.py": folder / "task.py"}
    assert Path(job.data.test) == (tmp_path / "job" / "test").resolve()
    about = tomllib.loads((folder / "pyproject.toml").read_text())
    assert about["project"]["name"] == "app"
    for app in about["tool"]["flwr"]["app"]["components"].values():
        assert (folder / f"{app.partition(':')[0]}.py").exists()
    pins = (folder / "requirements.txt").read_text().splitlines()[1:]
    assert set(about["project"]["dependencies"]) <= set(pins) and all("==" in pin for pin in pins)
    code, _, err = command("federate", "new", folder, "--from", source)
    assert code == 2 and "is not an empty folder" in err and err.count("\n") == 1


def test_a_job_that_is_resident_stays_as_it_is(tmp_path: Path) -> None:
    source = job_file(tmp_path / "job", JOB + "outer = { every = 5 }\n")
    project.create(tmp_path / "app", source, 1)
    job, _ = file.read(tmp_path / "app" / "job.toml")
    assert job.outer and job.outer.every == 5


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("run", "app"), "say --superlink"),
        (("run", "app", "--fleet", "x"), "x holds no fleet"),
        (("run", "app", "--flower", "none"), "no Flower in none"),
        (("run", "none"), "none is no folder of a Flower app"),
        (("join", "none", "--superlink", "x:1"), "none is no folder of a Flower app"),
        (("join", "app", "--superlink", "x:1", "--fleet", "x"), "x holds no fleet"),
    ],
)
def test_a_federation_says_what_it_lacks(
    arguments: tuple[str, ...],
    fault: str,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    project.create(Path("app"), job_file(tmp_path / "job"), 1)
    flower(tmp_path / ".flower")
    code, _, err = command("federate", *arguments)
    assert (code, err.count("\n"), fault in err) == (2, 1, True), err
    assert not (tmp_path / "none").exists()


FLWR = """\
#!/bin/sh
echo "$1 $2" >>"$0.calls"
case $1 in
    run) echo '{"run-id": "7"}' ;;
    list) echo '{"runs": [{"status": "running"}]}' ;;
    log)
        until [ "$(cut -d ' ' -f 3 /proc/$PPID/stat)" = S ]; do :; done  # it waits for this one
        kill -TERM $PPID && exec sleep 600
        ;;
esac
"""


def flower(environment: Path) -> Path:
    """Write a stand-in for the program of Flower, whose run goes on until somebody stops it, and whose log
    ends its caller.
    """
    program = environment / "bin" / "flwr"
    program.parent.mkdir(parents=True)
    program.write_text(FLWR)
    program.chmod(0o700)
    return program


def test_a_run_ends_with_its_command_and_before_the_next_one(tmp_path: Path, command: Command) -> None:
    app, program = tmp_path / "app", flower(tmp_path / "flower")
    project.create(app, job_file(tmp_path / "job"), 1)
    run = ("federate", "run", app, "--superlink", "127.0.0.1:9", "--flower", tmp_path / "flower")
    ended = ["list millpond", "stop 7"]
    one = [f"run {app}", "log 7", *ended]
    assert [command(*run).code for _ in range(2)] == [128 + signal.SIGTERM] * 2
    assert Path(f"{program}.calls").read_text().splitlines() == [*one, *ended, *one]


def prepared(rig: Rig, number: int) -> OuterMailbox:
    """Have the trainer that stands in for a job's tell its model."""
    eventually(lambda: number in rig.begun, f"the begin of job {number}", 20, 0.01)
    mailbox = rig.begun[number].context.outer
    assert mailbox
    mailbox.prepared(MODEL, STATE)
    return mailbox


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(2) as found:
        yield found


def test_a_resident_job_is_submitted_once_and_resumed_where_it_failed(
    rig: Rig, pool: ThreadPoolExecutor
) -> None:
    path = rig.write_job("home", "[outer]\nevery = 1\n")
    job = ResidentJob(rig.directory, path, patience=20)
    first = pool.submit(job.model)
    prepared(rig, 1)
    assert first.result()[0] == MODEL
    assert ResidentJob(rig.directory, path, patience=20).model()[0] == MODEL and len(rig.states) == 1
    rig.finish(1, "the model diverged")
    rig.begun.clear()
    asked = pool.submit(job.order, "train", "1", lambda _model: STATE)
    mailbox = prepared(rig, 1)
    order = eventually(mailbox.order, "the order", 20, 0.01)
    assert order.key.startswith("1/")
    mailbox.answer("train", order.key, OuterAnswer(5), STATE)
    assert asked.result().answer.samples == 5 and len(rig.states) == 1
    end = pool.submit(job.end, "end", lambda _model: STATE)
    while mailbox.order() is None:
        mailbox.wait(1.0)
    rig.finish(1)
    assert end.result() == 1
    assert job.end("end", lambda _model: STATE) == 1  # again, as its answer was lost
    again = pool.submit(job.model)
    prepared(rig, 2)
    assert again.result()[0] == MODEL  # the next federation has a job of its own


def test_a_job_that_was_stopped_is_left_alone(rig: Rig) -> None:
    path = rig.write_job("job1", "[outer]\nevery = 1\n")
    number = rig.submit(text="[outer]\nevery = 1\n")
    rig.wait_for(number, "running")
    assert rig.command("stop", str(number))[0] == 0
    with pytest.raises(Refused, match=r"was stopped: 'millpond resume 1' goes on"):
        ResidentJob(rig.directory, path, patience=5).model()


def test_a_job_without_the_table_is_no_client(rig: Rig) -> None:
    with pytest.raises(ConfigError, match=r"no table \[outer\]"):
        ResidentJob(rig.directory, rig.write_job("plain"), patience=5).model()
