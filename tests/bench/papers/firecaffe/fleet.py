# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): models of papers trained on a host and three devices, over one process alone."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.experiment import Run
from bench.fleets import running, trained
from bench.papers.exhibit import Shown, Value, measured
from bench.rows import ratios
from millpond.train import fit
from millpond.train.zoo import models, residual
from system.support import Emulation

_DEVICES = ("csd0", "csd1", "csd2")
_SIDE, _CLASSES, _BATCH = 64, 10, 64
_NAMES = {"MobileNetV2": "models:mobilenet_v2", "ResNet-18": "residual:resnet18"}
_JOB = """\
name = "{name}"

[data]
private = "private/photos"
public = "public/photos"

[model]
factory = "millpond.train.zoo.{factory}"
arguments = {{ classes = 10, side = 64 }}

[train]
learning_rate = 0.01
scheduler = {{ name = "PolynomialLR", total_iters = "total", power = 0.5, each = "step" }}

[synchronous]
epochs = 1
steps = 4
global_batch = 64
quorum = 1.0

[evaluate]
on = []
"""


@dataclass(frozen=True, slots=True)
class _Alone:
    """The task of one process: a model of the zoo, and labelled images."""

    name: str

    def model(self) -> torch.nn.Module:
        make = residual.resnet18 if self.name == "ResNet-18" else models.mobilenet_v2
        return make(_CLASSES, _SIDE)


def speeds(run: Run) -> Shown:
    """Train both models for an epoch on the fleet and in one process, in turn."""
    samples = 32 if run.quick else 128
    with running(_DEVICES, searched=False) as fleet:
        folders = _prepare(fleet, samples)
        names = [*_NAMES][:1] if run.quick else [*_NAMES]
        rows = [row for name in names for row in _rows(fleet, name, folders, run)]
    return Shown(
        tuple(rows),
        f"three devices and the host share the {os.cpu_count()} cores of one machine; images of 64x64 are "
        f"made up, {2 * samples} on each device, half of them private; batches of {_BATCH} in synchronous "
        "steps",
        "The paper adds processors, and this fleet does not: its four workers and the one process have "
        "the same cores. The fleet's speed is that of the steps; the one process also makes its model and "
        "reads the images in the time that counts.",
    )


def _prepare(fleet: Emulation, samples: int) -> list[Path]:
    random, folders = np.random.default_rng(0), []
    for device in _DEVICES:
        for part in ("private", "public"):
            folder = fleet.fleet.device_directory(device) / "flash" / part / "photos"
            folder.mkdir(parents=True)
            np.save(folder / "images.npy", random.integers(0, 256, (samples, 3, _SIDE, _SIDE), np.uint8))
            np.save(folder / "labels.npy", random.integers(0, _CLASSES, samples))
            folders.append(folder)
    return folders


def _rows(fleet: Emulation, name: str, folders: list[Path], run: Run) -> list[Value]:
    ours, alone = list[float](), list[float]()
    for turn in range(run.repeats):
        alone.append(_alone(name, folders))
        ours.append(_fleet(fleet, name, turn))
        run.say(f"{name}: {ours[-1]:.1f} images a second, in one process {alone[-1]:.1f}")
    about = f"{name}, {_SIDE} px, one epoch"
    return [
        measured(f"{about}: three devices and the host", "img/s", None, ours),
        measured(f"{about}: one process", "img/s", None, alone),
        measured(f"{about}: fleet over one process", "x", None, ratios(ours, alone)),
    ]


def _fleet(fleet: Emulation, name: str, turn: int) -> float:
    text = _JOB.format(name=f"{name}-{turn}", factory=_NAMES[name])
    (epoch,) = trained(fleet, f"{name}-{turn}", {"job.toml": text}, (*_DEVICES, "host"))
    return float(epoch.metrics["samples_per_second"])


def _alone(name: str, folders: list[Path]) -> float:
    began = time.monotonic()
    fit(_Alone(name), folders, tell=lambda _: None, batch=_BATCH, learning_rate=0.01, threads=0)
    samples = sum(len(np.load(folder / "labels.npy")) for folder in folders)
    return samples / (time.monotonic() - began)
