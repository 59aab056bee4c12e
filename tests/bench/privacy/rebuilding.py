# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): how many private samples a curious host rebuilds from the gradients that it has."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.experiment import Experiment, Run
from bench.privacy import inversion
from bench.privacy.levels import ALONE, HIDDEN, LEVELS, Level, fleet, mlp, one_step, public_part
from bench.privacy.measures import LEAST_PSNR, LEAST_SSIM, Floats, rebuilt, told
from bench.privacy.target import PIXELS, Digits, Maker, Model, digits, request_of, sum_of
from bench.rows import Row, summary
from millpond.train.zoo.models import digits_cnn

STEPS, QUICK_STEPS = 400, 20
Count = tuple[int, int]
"""Samples that were rebuilt, of how many."""


def measure(run: Run) -> list[Row]:
    """Rows ``inversion.MODEL.LEVEL.ATTACK``: the share of rebuilt samples, seed by seed."""
    torch.set_num_threads(1)
    found: dict[str, list[Count]] = {}
    words: dict[str, str] = {}
    for seed in range(run.repeats):
        for level in LEVELS:
            with tempfile.TemporaryDirectory() as folder:
                for attack, count in _linear(level, seed, Path(folder), run).items():
                    found.setdefault(f"inversion.mlp.{level.name}.{attack}", []).append(count)
                    words[f"inversion.mlp.{level.name}.{attack}"] = level.told
        with tempfile.TemporaryDirectory() as folder:  # the demo's model takes seconds at one group
            count = _demo(seed, Path(folder), run)
        found.setdefault("inversion.cnn.policy.angle", []).append(count)
        words["inversion.cnn.policy.angle"] = f"{ALONE.told}, the model of the demo"
        run.say(f"seed {seed}: " + ", ".join(f"{name[10:]} {found[name][-1][0]}" for name in found))
    return [_row(name, words[name], counts) for name, counts in found.items()]


def _row(name: str, words: str, counts: list[Count]) -> Row:
    right, of = (sum(column) for column in zip(*counts, strict=True))
    what = f"samples rebuilt ({LEAST_PSNR:g} dB, SSIM {LEAST_SSIM:g}): {words}; {told(right, of)}"
    return summary(name, what, [100 * found / of for found, of in counts], "%")


def _linear(level: Level, seed: int, folder: Path, run: Run) -> dict[str, Count]:
    """Attack a network of linear layers, also with what needs no gradient: the chance of each attack."""
    seen, model, truth, known = _seen(level, mlp, seed, folder)
    weight = seen[: HIDDEN * PIXELS].reshape(HIDDEN, PIXELS)
    labels = _labels(model, seen, known, len(truth))
    guesses = {
        "analytic": inversion.analytic(weight, seen[HIDDEN * PIXELS :][:HIDDEN]),
        **_chances(labels, known, seed),
    }
    steps = QUICK_STEPS if run.quick else STEPS
    net = model.loaded(model.first)
    guesses["squares"] = inversion.matched(net, seen, labels, "squares", steps, seed)
    guesses["angle"] = inversion.matched(net, seen, labels, "angle", steps, seed)
    return {attack: (rebuilt(own, truth.images), len(truth)) for attack, own in guesses.items()}


def _demo(seed: int, folder: Path, run: Run) -> Count:
    seen, model, truth, known = _seen(ALONE, digits_cnn, seed, folder)
    labels = _labels(model, seen, known, len(truth))
    steps = QUICK_STEPS if run.quick else STEPS
    guesses = inversion.matched(model.loaded(model.first), seen, labels, "angle", steps, seed)
    return rebuilt(guesses, truth.images), len(truth)


def _seen(level: Level, make: Maker, seed: int, folder: Path) -> tuple[Floats, Model, Digits, Digits]:
    """Return the gradient that a host has of one group of each device, the model, the samples that it is of,
    and those that the host knows.
    """
    data, model = digits(seed), Model(make, seed)
    work, factor = one_step(level)
    samples = level.group if level.secure else max(2 * level.group, 40)  # masked updates are of all samples
    devices = fleet(level, data, samples, model, work, folder)
    request = request_of((0, level.group))
    requests = {device.name: request for device in devices}
    seen = sum_of(devices, requests, dict.fromkeys(requests, model.first), level.rho) / factor
    parts = [device.covered(request) for device in devices]
    truth = Digits(
        np.concatenate([part.images for part in parts]), np.concatenate([part.labels for part in parts])
    )
    return seen, model, truth, public_part(data)


def _labels(model: Model, seen: Floats, known: Digits, samples: int) -> NDArray[np.int64]:
    with torch.no_grad():
        images = torch.tensor(known.images, dtype=torch.float32).view(-1, 1, 8, 8)
        chances = torch.softmax(model.loaded(model.first)(images), 1).mean(0).numpy().astype(float)
    return inversion.labels_of(seen[-len(chances) :], chances, samples)


def _chances(labels: NDArray[np.int64], known: Digits, seed: int) -> Mapping[str, Floats]:
    """Return what somebody guesses who knows the labels alone: the mean of a class, or any sample of it."""
    rng = np.random.default_rng(seed)
    own = [known.images[known.labels == label] for label in labels]
    return {
        "chance_mean": np.array([each.mean(0) for each in own]),
        "chance_sample": np.array([each[rng.integers(len(each))] for each in own]),
    }


EXPERIMENT = Experiment("inversion", "Private samples that a curious host rebuilds from gradients", measure)
