# SPDX-License-Identifier: Apache-2.0
"""'millpond data check' of a device's folders: a job tells as much of a private one, a public one is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .support import Emulation, millpond

pytestmark = pytest.mark.timeout(240)

TASK = """\
import torch
from torch import nn


class Words:
    def model(self):
        return nn.Linear(3, 1)

    def dataset(self, folder, split):
        words = (folder / "words.txt").read_text().split()
        return [{"word": torch.tensor([len(each)] * len(words)), "patient " + words[0]: 1} for each in words]

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, 0.1)
"""


def check(fleet: Emulation, *arguments: str | Path) -> dict[str, Any]:
    result = millpond("data", "check", "--fleet", fleet.directory, *arguments, "--format", "json")
    assert result.code == 0, f"{result}\n{fleet.logs()}"
    found: dict[str, Any] = json.loads(result.out)
    return found


def refused(fleet: Emulation, *arguments: str | Path) -> str:
    result = millpond("data", "check", "--fleet", fleet.directory, *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1), f"{result}\n{fleet.logs()}"
    return result.err.removeprefix("millpond: ").rstrip()


def private(fleet: Emulation, name: str) -> Path:
    """A new private folder of csd1: the flash of a running device is not changed behind its back."""
    folder = fleet.fleet.device_directory("csd1") / "flash" / "private" / name
    folder.mkdir()
    return folder


def images(fleet: Emulation, name: str, labels: list[int]) -> str:
    """A new private folder of images with these labels, as 'data check' names it."""
    folder = private(fleet, name)
    np.save(folder / "images.npy", np.zeros((len(labels), 8, 8), np.uint8))
    np.save(folder / "labels.npy", np.array(labels, np.int64))
    return f"csd1:private/{name}"


def test_images_of_a_private_folder_are_told_without_labels(fleet: Emulation) -> None:
    own = fleet.fleet.device_directory("csd0") / "flash" / "private" / "digits" / "labels.npy"
    samples = len(np.load(own))
    with fleet.client() as client:
        before, jobs = client.ledgers()["csd0"].sent, client.jobs()
    found = check(fleet, "csd0:private/digits")
    assert found == {
        "folder": "csd0:private/digits",
        "samples": samples,
        "held_out": 0,
        "group": 8,
        "batch": {"[0]": "float32 Nx1x8x8", "[1]": "int64 N"},
        "classes": [],
    }
    with fleet.client() as client:
        after = client.ledgers()["csd0"].sent
        assert client.jobs() == jobs  # the job without rounds has left nothing
    assert after["parameters"] == before["parameters"]
    held = check(fleet, "csd0:private/digits", "--job", scored_there(fleet))
    assert held["held_out"] > 0 and held["held_out"] % 8 == 0
    assert held["samples"] + held["held_out"] == samples
    text = millpond("data", "check", "--fleet", fleet.directory, "csd0:private/digits/").out
    assert f"csd0:private/digits: {samples} samples in groups of 8\n" in text


def scored_there(fleet: Emulation) -> Path:
    """The example, with samples that the devices hold out."""
    path = fleet.base / "digits-there.toml"
    text = (fleet.base / "digits.toml").read_text()
    path.write_text(text.replace("[evaluate]\n", '[evaluate]\non = ["host", "devices"]\n'))
    return path


def test_a_tasks_batch_is_told_without_names_and_lengths_of_its_own(fleet: Emulation, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    task = ("--task", f"{tmp_path / 'task.py'}:Words")
    (private(fleet, "words") / "words.txt").write_text("Smith " * 9)
    found = check(fleet, "csd1:private/words", *task)
    assert (found["samples"], found["batch"]) == (9, {"word": "int64 Nx*", "?": "int64 N"})
    (private(fleet, "wordless") / "words.txt").write_text("")
    said = refused(fleet, "csd1:private/wordless", *task)
    assert said == "csd1: missing data: private/wordless holds no samples"
    private(fleet, "fileless")
    said = refused(fleet, "csd1:private/fileless", *task)
    assert said.startswith(
        "csd1: FileNotFoundError at task.py:10 in dataset; its message stays on the device"
    )


def test_data_that_no_job_can_have_are_one_line(fleet: Emulation) -> None:
    private(fleet, "odd")
    said = refused(fleet, "csd1:private/odd")
    assert said.startswith(
        "csd1: missing data: private/odd has no images.npy, no *-images-idx3-ubyte and no "
    )
    assert said.endswith("; for other data say how it is read, with --task or --job")
    said = refused(fleet, images(fleet, "none", []))
    assert said == "csd1: missing data: private/none/images.npy holds no samples"
    said = refused(fleet, images(fleet, "one", [1]))
    assert said == "csd1: policy.least_samples: 'private/one' has 1 samples; an answer covers 8 or more"
    said = refused(fleet, images(fleet, "negative", [-1] * 8))
    assert said == "csd1: private/negative/images.npy: a label is negative"
    beyond, job = images(fleet, "beyond", [10] * 8), ("--job", fleet.base / "digits.toml")
    assert check(fleet, beyond)["samples"] == 8
    said = refused(fleet, beyond, *job)
    assert said == "csd1: private/beyond holds a label beyond the model's 10 classes"
    said = refused(fleet, "csd1:private/nowhere")
    assert said == "csd1: missing data: there is no folder private/nowhere"
    assert refused(fleet, "csd9:private/odd") == "there is no device 'csd9'; the fleet has csd0, csd1, csd2"


def test_a_public_folder_is_told_whole(fleet: Emulation) -> None:
    labels = np.load(fleet.fleet.device_directory("csd0") / "flash" / "public" / "digits" / "labels.npy")
    found = check(fleet, "csd0:public/digits")
    assert (found["folder"], found["format"]) == ("csd0:public/digits", "npy")
    assert (found["samples"], sum(found["classes"].values())) == (len(labels), len(labels))
    said = refused(fleet, "csd0:public/none")
    assert said == "missing data: there is no folder csd0:public/none"
