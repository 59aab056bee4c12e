# SPDX-License-Identifier: Apache-2.0
"""``millpond data check``: a folder as a worker would see it, on the host and on a device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.forking import CLI, Result, server

from millpond.host.remote.device_data import looking_at
from millpond.train.job.check import check as check_job
from millpond.train.job.host_spec import EvaluationSpec
from millpond.train.job.spec import DataSpec, Job, ModelSpec, SynchronousSpec

TASK = """\
import torch
from torch import nn


class Words:
    def model(self):
        return nn.Linear(3, 1)

    def dataset(self, folder, split):
        lines = (folder / "words.txt").read_text().splitlines()
        return [{"word": line, "length": torch.tensor([len(line)] * 3)} for line in lines]


class Broken(Words):
    def dataset(self, folder, split):
        raise KeyError("column")
"""
MODEL = "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))\n"
JOB = """\
name = "check"
[data]
private = "private/digits"
test = "test"
format = "{}"
[model]
factory = "net:build"
files = ["net.py"]
"""


def check(*arguments: str | Path) -> Result:
    return server(CLI, "millpond.train.worker.roles").run("millpond", "data", "check", *arguments)


def refused(*arguments: str | Path) -> str:
    done = check(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("millpond: ")
    assert done.err.count("\n") == 1
    return done.err.removeprefix("millpond: ").rstrip()


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    folder = tmp_path / "test"
    folder.mkdir()
    np.save(folder / "images.npy", np.zeros((5, 4, 4), np.uint8))
    np.save(folder / "labels.npy", np.array([0, 2, 2, 0, 3]))
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "job.toml").write_text(JOB.format("npy"))
    return folder


def test_images_are_found_without_a_job(digits: Path) -> None:
    done = check(digits, "--format", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == {
        "folder": str(digits),
        "format": "npy",
        "samples": 5,
        "batch": {"[0]": "float32 Nx1x4x4", "[1]": "int64 N"},
        "classes": {"0": 2, "1": 0, "2": 2, "3": 1},
    }
    text = check(digits).out
    assert f"{digits}: 5 samples, npy" in text
    assert "float32 Nx1x4x4" in text


def test_a_job_says_what_its_model_cannot_have(digits: Path) -> None:
    job = digits.parent / "job.toml"
    assert refused(digits, "--job", job) == f"{digits} holds a label beyond the model's 3 classes"
    np.save(digits / "labels.npy", np.array([0, 2, 2, 0, 1]))
    assert check(digits, "--job", job).code == 0


def test_classes_have_the_names_of_the_jobs_test_folder(digits: Path) -> None:
    for folder, names in (("test", ("cat", "cow", "dog")), ("own", ("dog", "cow"))):
        for name in names:
            (digits.parent / folder / name).mkdir(parents=True)
            Image.new("L", (4, 4)).save(digits.parent / folder / name / "1.png")
    job = digits.parent / "job.toml"
    job.write_text(JOB.format("images"))
    done = check(digits.parent / "own", "--job", job, "--format", "json")
    assert json.loads(done.out)["classes"] == {"0 cat": 0, "1 cow": 1, "2 dog": 1}


def test_a_task_reads_its_own_data(digits: Path) -> None:
    (digits / "words.txt").write_text("one\nseven\n")
    task = digits.parent / "task.py"
    done = check(digits, "--task", f"{task}:Words", "--format", "json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["format"], found["samples"]) == ("list", 2)
    assert found["batch"] == {"word": "str", "length": "int64 Nx3"}
    (digits / "words.txt").write_text("")
    assert refused(digits, "--task", f"{task}:Words") == f"missing data: {digits} holds no samples"
    broken = refused(digits, "--task", f"{task}:Broken")
    assert broken == f"{digits}: KeyError: 'column' (at task.py:16 in dataset)"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nowhere",), "missing data: there is no folder nowhere"),
        (("csd0:digits",), "csd0:digits: a device has its data in public and private: csd0:private/FOLDER"),
        (("csd0:public/../private",), "csd0:public/../private: a device has its data in public and private"),
        (("csd0:private/digits", "--fleet", "/nowhere"), "/nowhere holds no fleet: make one with "),
        (("csd0:public/digits", "--fleet", "/nowhere"), "/nowhere holds no fleet: make one with "),
        ((".", "--task", "task.py", "--job", "job.toml"), "--task and --job are two ways"),
        ((".", "--task", "nowhere.py:Task"), "--task: there is no file nowhere.py"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    assert refused(*arguments).startswith(complaint)


def test_a_folder_of_nothing_known_says_how_to_go_on(tmp_path: Path) -> None:
    assert refused(tmp_path).startswith(
        f"missing data: {tmp_path} has no images.npy, no *-images-idx3-ubyte and no sub-"
    )


DATA = DataSpec("private/digits", "/test", "public/digits", "images", ("cat", "dog"))


@pytest.mark.parametrize(
    ("evaluate", "held_out"),
    [
        (EvaluationSpec(target=0.9), 0.0),
        (EvaluationSpec(on=("host", "devices"), held_out=0.2, patience=3), 0.2),
    ],
)
def test_it_has_what_the_device_needs_and_no_more(evaluate: EvaluationSpec, held_out: float) -> None:
    devices = ("csd0", "csd2")
    job = Job(
        "own", DATA, ModelSpec("net:build"), synchronous=SynchronousSpec(), evaluate=evaluate, devices=devices
    )
    found = check_job(looking_at(job, "csd1", "private/other"), "check")
    assert found.devices == ("csd1",)
    assert found.data == DataSpec("private/other", format="images", classes=("cat", "dog"))
    assert (found.total, found.synchronous) == (0, None)
    assert (found.work.total, found.work.held_out, found.work.model) == (0, held_out, job.model)
