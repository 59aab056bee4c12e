# SPDX-License-Identifier: Apache-2.0
"""Tasks that are not images, on a fleet as in one process: what 'millpond new' writes, and another."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..forking import TRAINING, server
from .support import Emulation, millpond

pytestmark = pytest.mark.timeout(400)

POINT = 0.01
FEW_SAMPLES = 0.03
"""For steps on the 332 samples of the tabular project, four an epoch: ten seeds in one process come to an R2
of 0.483 to 0.501, and the measured speeds, which divide a step among the devices, decide on the order here.
"""
COSINE = {"name": "CosineAnnealingLR", "T_max": "total"}
DEVICES = ("csd0", "csd1", "csd2")
STEPS = "patience = 0\npolicy = 'fixed'\nhost = false\n"
"""Every step waits for all workers, and their batches stay."""

SHAPES = '''
import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate
from torch.utils.data import TensorDataset


class Net(nn.Module):
    """A small U-Net."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up = nn.Conv2d(24, 1, 3, padding=1)

    def forward(self, images):
        fine = self.down(images).relu()
        return self.up(torch.cat([fine, interpolate(self.middle(fine).relu(), scale_factor=2.0)], 1))


class Shapes:
    """Discs among noise: which pixels are of a disc."""

    def model(self):
        return Net()

    def dataset(self, folder, split):
        count, seed = map(int, (folder / "discs.txt").read_text().split())
        rng = np.random.default_rng(seed)
        y, x = np.mgrid[:16, :16]
        centres, radius = rng.uniform(4, 12, (count, 2, 1, 1)), rng.uniform(2, 5, (count, 1, 1))
        masks = (((x - centres[:, 0]) ** 2 + (y - centres[:, 1]) ** 2) < radius**2).astype(np.float32)
        images = masks + rng.normal(0, 0.5, masks.shape).astype(np.float32)
        return TensorDataset(*(torch.from_numpy(a.astype(np.float32))[:, None] for a in (images, masks)))

    def loss(self, model, batch):
        images, masks = batch
        return binary_cross_entropy_with_logits(model(images), masks, reduction="sum"), masks.numel()

    def metrics(self, model, batch):
        images, masks = batch
        found = model(images) > 0
        return {"iou": ((found & (masks > 0)).sum(), (found | (masks > 0)).sum())}
'''
SHAPES_JOB = """\
name = "shapes"
[data]
private = "private/shapes"
test = "test"
[task]
factory = "task:Shapes"
files = ["task.py"]
[train]
batch = 16
optimizer = "Adam"
learning_rate = 1e-2
scheduler = { name = "CosineAnnealingLR", T_max = "total" }
[federated]
rounds = 12
[evaluate]
metric = "iou"
"""
ALONE = """
import json, os, sys
os.chdir(sys.argv[4])
sys.path.insert(0, "")
import task
from millpond.train import fit
name, folders, keys = sys.argv[1], sys.argv[2].split(), json.loads(sys.argv[3])
fitted = fit(getattr(task, name)(), folders, "test", tell=lambda line: None, **keys)
print(json.dumps(fitted.scores[-1]))
"""


def project(fleet: Emulation, template: str) -> Path:
    """A project of 'millpond new', whose private data lie on the devices."""
    folder = fleet.base / "projects" / template
    folder.parent.mkdir(exist_ok=True)
    made = millpond("new", folder, "--template", template)
    assert made.code == 0, made
    subprocess.run([sys.executable, "data.py"], cwd=folder, check=True)
    for name in DEVICES:
        private = fleet.directory / "devices" / name / "flash" / "private"
        shutil.copytree(folder / "data" / name, private, dirs_exist_ok=True)
    return folder


def train(fleet: Emulation, job: Path, *settings: str) -> tuple[dict[str, Any], list[str]]:
    """Train; returns the document of the job, and its log."""
    options = [text for setting in settings for text in ("--set", setting)]
    result = fleet.millpond("train", job, *options, "--format", "json", timeout=300)
    assert result.code == 0, f"{result}\n{fleet.logs()}"
    document = json.loads(result.out)
    log = (fleet.directory / "jobs" / str(document["job"]["id"]) / "job.log").read_text()
    return document, log.splitlines()


def synchronous(job: Path, table: str) -> Path:
    """The same job in synchronous steps."""
    steps = f"[synchronous]\n{STEPS}{table}"
    text = re.sub(r"\[federated\].*?(?=\n\[|\Z)", steps, job.read_text(), flags=re.S)
    path = job.with_name("synchronous.toml")
    path.write_text(text.replace('name = "', 'name = "sync-', 1))
    return path


def alone(folder: Path, task: str, data: str, **keys: Any) -> dict[str, float]:
    """The figures of the same task, trained in one process on the data of all devices."""
    folders = " ".join(f"data/{name}/{data}" for name in DEVICES)
    program = folder / "alone.py"
    program.write_text(ALONE)
    done = server(*TRAINING).run(program, task, folders, json.dumps(keys), folder)
    assert done.code == 0, done.err
    figures: dict[str, float] = json.loads(done.out)
    return figures


@pytest.mark.full  # the regression goes the same ways
def test_a_task_of_texts_learns_as_in_one_process(fleet: Emulation) -> None:
    folder = project(fleet, "text")
    keys = {"optimizer": "AdamW", "learning_rate": 5e-3}
    expected = alone(folder, "Sentiment", "text", epochs=12, **keys)["accuracy"]
    assert expected > 0.98
    rounds, _ = train(fleet, folder / "job.toml")
    assert rounds["job"]["score"] == pytest.approx(expected, abs=POINT)
    steps, _ = train(fleet, synchronous(folder / "job.toml", "epochs = 12\nglobal_batch = 32"))
    assert steps["job"]["score"] == pytest.approx(expected, abs=POINT)


def test_a_regression_learns_as_in_one_process_and_scores_where_the_data_are(fleet: Emulation) -> None:
    folder = project(fleet, "tabular")
    expected = alone(folder, "Diabetes", "patients", epochs=30, batch=1000, learning_rate=0.05)["r2"]
    assert expected > 0.4
    both = 'evaluate.on=["host"]'
    rounds, _ = train(fleet, folder / "job.toml", both)
    assert rounds["job"]["score"] == pytest.approx(expected, abs=1e-3)
    keys = {"batch": 96, "learning_rate": 0.02, "scheduler": COSINE}
    expected = alone(folder, "Diabetes", "patients", epochs=30, **keys)["r2"]
    job = synchronous(folder / "job.toml", "epochs = 30\nglobal_batch = 96")
    decay = "train.scheduler={ name = 'CosineAnnealingLR', T_max = 'total' }"
    steps, _ = train(fleet, job, both, "train.momentum=0.9", "train.learning_rate=0.02", decay)
    assert steps["job"]["score"] == pytest.approx(expected, abs=FEW_SAMPLES)
    with fleet.client() as client:
        before = client.ledgers()
    scored, _ = train(fleet, folder / "job.toml", "federated.rounds=2")
    devices = scored["rounds"][-1]["scores"]["devices"]
    assert set(devices) == {"residual", "wanted", "squared", "loss", "r2"}
    with fleet.client() as client:
        after = client.ledgers()
    for name in DEVICES:
        left = {kind: after[name].sent[kind] - count for kind, count in before[name].sent.items()}
        assert left["metrics"] < 10_000 and 0 < left["parameters"] < 10_000


@pytest.mark.full
def test_a_segmentation_learns_as_in_one_process(fleet: Emulation) -> None:
    folder = fleet.base / "projects" / "shapes"
    folder.mkdir(parents=True)
    (folder / "task.py").write_text(SHAPES)
    (folder / "job.toml").write_text(SHAPES_JOB)
    for number, (name, count) in enumerate(zip((*DEVICES, "test"), (300, 200, 150, 200), strict=True)):
        own = folder / "test" if name == "test" else folder / "data" / name / "shapes"
        own.mkdir(parents=True)
        (own / "discs.txt").write_text(f"{count} {number}")
        if name != "test":
            private = fleet.directory / "devices" / name / "flash" / "private" / "shapes"
            shutil.copytree(own, private)
    keys = {"batch": 16, "optimizer": "Adam", "learning_rate": 1e-2, "scheduler": COSINE}
    expected = alone(folder, "Shapes", "shapes", epochs=12, **keys)["iou"]
    assert expected > 0.85
    rounds, _ = train(fleet, folder / "job.toml")
    assert rounds["job"]["score"] == pytest.approx(expected, abs=POINT)
    steps, _ = train(fleet, synchronous(folder / "job.toml", "epochs = 12\nglobal_batch = 16"))
    assert steps["job"]["score"] == pytest.approx(expected, abs=POINT)


@pytest.mark.full
def test_adapters_alone_are_trained_and_sent(fleet: Emulation) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    folder = project(fleet, "finetune")
    keys = {"optimizer": "AdamW", "learning_rate": 5e-3}
    expected = alone(folder, "Sentiment", "text", epochs=12, **keys)["accuracy"]
    rounds, log = train(fleet, folder / "job.toml")
    assert rounds["job"]["score"] == pytest.approx(expected, abs=POINT)
    (line,) = (line for line in log if "values are trained and exchanged" in line)
    trained, values = map(int, re.findall(r"(\d+) of (\d+) values", line)[0])
    assert trained < 0.05 * values
    for to, back in rounds["rounds"][-1]["tunnel"].values():
        assert 4 * trained < back < 8 * trained and 4 * trained < to < 12 * trained
    steps, _ = train(fleet, synchronous(folder / "job.toml", "epochs = 12\nglobal_batch = 32"))
    assert steps["job"]["score"] == pytest.approx(expected, abs=POINT)
