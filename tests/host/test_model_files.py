# SPDX-License-Identifier: Apache-2.0
"""The model of a job as a file of the user's own, and whose job it is."""

from __future__ import annotations

import json
import os
import pwd
import threading
from pathlib import Path

import pytest

from millpond.base.errors import Refused
from millpond.host.client.daemon_client import DaemonClient

from ..waiting import eventually
from .daemon_rig import Rig
from .stored import jobs_of


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rig's models have a relative path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"values")


def test_a_model_is_written_whole_and_replaces_a_file(rig: Rig, tmp_path: Path) -> None:
    rig.submit()
    own = tmp_path / "own"
    own.mkdir()
    for arguments, error in (
        (("1", "own/m"), "job 1 has no model yet: it is running"),
        (("--best", "1", "own/m"), "job 1 has no model of a best score yet"),
        (("9", "own/m"), "there is no job 9"),
    ):
        code, _, err = rig.command("jobs", "model", *arguments)
        assert code == 2 and error in err and err.count("\n") == 1
    rig.wait_for(1, "running")
    (rig.directory / "jobs/1/best.safetensors").write_bytes(b"best")
    assert rig.command("jobs", "model", "--best", "1", "own/best")[0] == 0
    rig.finish(1)
    (own / "m").write_text("a model of before")
    assert rig.command("jobs", "model", "1", "own/m")[1] == "the model of job 1 is in own/m\n"
    assert {path.name: path.read_bytes() for path in own.iterdir()} == {"m": b"values", "best": b"best"}
    code, _, err = rig.command("jobs", "model", "1", "nowhere/m")
    assert code == 2 and "nowhere/m: No such file or directory" in err and err.count("\n") == 1
    rig.command("jobs", "prune", "--keep", "0")
    with DaemonClient(rig.directory) as client, pytest.raises(Refused, match="job 1: its files are pruned"):
        client.save_model(1, own / "m")
    assert (own / "m").read_bytes() == b"values"


def test_train_writes_the_model_in_the_end(rig: Rig, tmp_path: Path) -> None:
    def end() -> None:
        eventually(lambda: 1 in rig.begun, "the job has begun", 20, 0.01)
        rig.finish(1)

    ending = threading.Thread(target=end)
    ending.start()
    code, out, err = rig.command("train", str(rig.write_job("own")), "--model", "mine")
    ending.join()
    assert (code, err) == (0, "")
    assert "; mine\n" in out and (tmp_path / "mine").read_bytes() == b"values"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--model", "nowhere/mine"), "nowhere/mine: no file can be written there"),
        (("--model", "."), ".: no file can be written there"),
        (("--model", "mine", "--detach"), "--model needs the end of the job"),
    ],
)
def test_a_model_that_cannot_be_written_is_told_before_the_job_is_queued(
    rig: Rig, arguments: tuple[str, ...], error: str
) -> None:
    code, _, err = rig.command("train", str(rig.write_job("own")), *arguments)
    assert code == 2 and error in err and err.count("\n") == 1
    assert jobs_of(rig.store) == []


def test_jobs_have_the_user_who_has_submitted_them(rig: Rig) -> None:
    rig.submit()
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert f" {user} " in rig.command("jobs")[1]
    (found,) = json.loads(rig.command("jobs", "--format", "json")[1])["jobs"]
    assert found["owner"] == os.geteuid()
