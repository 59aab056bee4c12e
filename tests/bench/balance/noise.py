# SPDX-License-Identifier: Apache-2.0
"""Edge (files): makes data without meaning, for experiments that measure only time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.balance.processes import Work
from millpond.train.job.spec import SynchronousSpec, TrainingSpec

SIDE = 32


def random_work(
    folder: Path, counts: Mapping[str, int], how: SynchronousSpec, seed: int, **more: Any
) -> Work:
    """The CNN of the DPU paper on noise: ``counts`` are the samples of each folder."""
    random = np.random.default_rng(seed)
    for name, count in counts.items():
        (folder / name).mkdir()
        images = random.integers(0, 255, (count, 3, SIDE, SIDE), dtype=np.uint8)
        np.save(folder / name / "images.npy", images)
        np.save(folder / name / "labels.npy", random.integers(0, 10, count))
    private = tuple(folder / name for name in counts if name.startswith("private"))
    factory, training = "millpond.train.zoo.models:cifar_cnn", TrainingSpec("sgd", 0.001)
    return Work(factory, {}, private, folder / "public", folder / "test", training, how, seed, **more)
