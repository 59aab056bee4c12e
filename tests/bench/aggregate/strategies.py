# SPDX-License-Identifier: Apache-2.0
"""Edge (files): how far each strategy is from a plain torch reference of it, in points of accuracy."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from bench.experiment import Run
from bench.rows import Row, summary
from train import personal_reference, strategy_reference
from train.personal_reference import PERSONALIZED
from train.strategy_reference import COUNTS, REFERENCES, ROUNDS, TESTED

TITLE = "Strategies: points of accuracy between each and its reference"
SEEDS = (0, 1, 2)


def measure(run: Run) -> list[Row]:
    """Rows ``strategies`` (the largest of all), ``strategies.NAME`` and ``strategies.NAME.accuracy``."""
    torch.set_num_threads(1)
    rounds, seeds = (2, SEEDS[:1]) if run.quick else (ROUNDS, SEEDS)
    rows: list[Row] = []
    largest = [0.0 for _ in seeds]
    compared = {
        **dict.fromkeys(REFERENCES, (strategy_reference.compare, f"{TESTED} test images")),
        **dict.fromkeys(PERSONALIZED, (personal_reference.compare, "what clients hold out")),
    }
    for name, (compare, tested) in compared.items():
        found = []
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                found.append(compare(name, Path(folder), seed, rounds))
        points = [abs(each.ours - each.reference) for each in found]
        largest = [max(pair) for pair in zip(largest, points, strict=True)]
        what = f"after {rounds} rounds of {len(COUNTS)} uneven clients, {tested}, seed by seed"
        rows.append(_row(f"strategies.{name}", f"points from its reference, {what}", points, "points"))
        accuracies = [each.ours for each in found]
        rows.append(_row(f"strategies.{name}.accuracy", f"accuracy {what}", accuracies, "%"))
        run.say(f"{name}: {', '.join(f'{each:.1f} %' for each in accuracies)}, off by {max(points):.2f}")
    return [_row("strategies", "points of the farthest strategy", largest, "points"), *rows]


def _row(figure: str, what: str, values: list[float], unit: str) -> Row:
    return summary(figure, what, values, unit, peer="plain torch")
