# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): whether a curious host can tell a property of a device's data that no label names.

The property: half of a device's pictures are from a dim sensor. The attacker trains a classifier on updates
of its own at the same state, with and without the property, and asks it about the device's update or a sum
in which that is (Melis et al. 2019, arXiv:1805.04049, the passive attack). Sums are added in the clear: those
of masked updates have the same bits (``tests/aggregate/test_masked_sums.py``).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

from bench.experiment import Experiment, Run
from bench.privacy.federation import noisy
from bench.privacy.levels import BATCH, PASSES, ROUND_LEVELS, Level, mlp
from bench.privacy.measures import Floats, auc
from bench.privacy.target import Digits, Model, TargetDevice, digits, request_of, rounds_work
from bench.rows import Row, summary

EACH, POOL, SUMS = 40, 160, 400
"""Samples of a device, devices of which updates are known, and sums of them."""
DIM, PARTS = 0.5, 24
"""The factor of a dim picture, and the components of updates that the classifier has."""


def measure(run: Run) -> list[Row]:
    """Rows ``property.LEVEL.auc``."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {level.name: [] for level in ROUND_LEVELS}
    seeds = 1 if run.quick else min(run.repeats, 3)
    for seed in range(seeds):
        data = digits(seed)
        model = Model(mlp, seed)
        half, pool = len(data) // 2, 24 if run.quick else POOL
        with tempfile.TemporaryDirectory() as folder:
            known, own = (
                _updates(part, model, pool, seed, Path(folder) / name)
                for name, part in (
                    ("known", data.part(slice(0, half))),
                    ("own", data.part(slice(half, None))),
                )
            )
        for level in ROUND_LEVELS:
            found[level.name].append(_attack(level, known, own, seed))
        run.say(f"seed {seed}: " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in found.items()))
    words = f"AUC of whether half of a device's {EACH} samples are dim, chance 0.5; {SUMS} sums"
    return [
        summary(f"property.{level.name}.auc", f"{words}: {level.told}", found[level.name], "")
        for level in ROUND_LEVELS
    ]


def _updates(data: Digits, model: Model, pool: int, seed: int, folder: Path) -> tuple[Floats, Floats]:
    """Return the updates of devices with samples of ``data`` without and with the property."""
    rng, work = np.random.default_rng(seed), rounds_work(PASSES, BATCH)
    found: tuple[list[Floats], list[Floats]] = ([], [])
    for number in range(pool):
        own = data.part(rng.choice(len(data), EACH, replace=False))
        has = number % 2
        if has:
            own.images[: EACH // 2] *= DIM
        device = TargetDevice(f"csd{number}", own, model, work, folder)
        _, values = device.answer(request_of((0, EACH)), model.first)
        found[has].append(np.frombuffer(bytes(values), np.float32).astype(float) / EACH)
    return np.array(found[0]), np.array(found[1])


def _attack(level: Level, known: tuple[Floats, Floats], own: tuple[Floats, Floats], seed: int) -> float:
    rng = np.random.default_rng(seed)
    learned, has = _sums(level, known, rng)
    parts = PCA(min(PARTS, len(known[0])), random_state=0).fit(np.concatenate(known))
    classifier = LogisticRegression(max_iter=1000)
    scale = parts.transform(learned).std(0)
    classifier.fit(parts.transform(learned) / scale, has)
    asked, true = _sums(level, own, rng)
    scores = classifier.decision_function(parts.transform(asked) / scale)
    return auc(scores[true == 1], scores[true == 0])


def _sums(level: Level, updates: tuple[Floats, Floats], rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return sums, and whether the first device of each has the property; the others have it by chance."""
    count, every = SUMS, np.concatenate(updates)
    has = np.arange(count) % 2
    first = np.array([updates[each][rng.integers(len(updates[each]))] for each in has])
    found = noisy(first, level, rng)
    for _ in range(level.devices - 1):
        found = found + noisy(every[rng.integers(len(every), size=count)], level, rng)
    return found, has.astype(float)


EXPERIMENT = Experiment("property", "Whether a device's data have a property", measure)
