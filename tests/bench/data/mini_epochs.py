# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): accuracy of mini-epochs against plain training with as many visits of samples."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from bench.data.tiered_training import Setting, digits, plain, repeated, synthetic, trained
from bench.experiment import Run
from bench.rows import Row, summary
from millpond.train.repeats import rule_of

TITLE = "accuracy of repeated mini-epochs"
SEEDS = range(5)
_PARTS = 8
_RULES: dict[str, int | str] = {"rf16": 16, "score": "score", "bands": "bands"}


def measure(run: Run) -> list[Row]:
    """Train plainly, with fixed and with adaptive repeats, on sorted and unsorted storage."""
    lost: dict[str, dict[str, float]] = {name: {} for name in _RULES}
    seeds, setting = (SEEDS[:1], Setting(visits=4)) if run.quick else (SEEDS, Setting())
    for data, split_of in {"digits": digits, "synthetic": synthetic}.items():
        for storage in ("sorted", "unsorted"):
            found = {name: list[float]() for name in ("plain", *_RULES)}
            for seed in seeds:
                split = split_of(seed, in_order=storage == "sorted")
                found["plain"].append(trained(split, seed, setting, plain(split, seed, setting)))
                for name, rule in _RULES.items():
                    accuracy, _ = repeated(split, seed, setting, _PARTS, rule_of(rule))
                    found[name].append(accuracy)
            for name in _RULES:
                lost[name][f"{data}, {storage}"] = 100 * (fmean(found["plain"]) - fmean(found[name]))
            told = ", ".join(f"{name} {100 * fmean(values):.1f} %" for name, values in found.items())
            run.say(f"{data}, {storage}: {told}")
    return list(_rows(lost))


def _rows(lost: dict[str, dict[str, float]]) -> Iterator[Row]:
    common = {"peer": "plain training, another order in each epoch", "emulation": None}
    about = "points of accuracy lost, mean of 5 seeds, {}, over digits and synthetic, sorted and unsorted"
    yield summary("met_points_rf16", about.format("rf 16"), [max(lost["rf16"].values())], "points", **common)
    for rule in ("score", "bands"):
        figure = about.format(f"repeats by {rule}")
        yield summary(f"met_points_{rule}", figure, [max(lost[rule].values())], "points", **common)
    best = min(("score", "bands"), key=lambda rule: max(lost[rule].values()))
    figure = about.format(f"the better adaptive rule ({best})")
    yield summary("met_points_adaptive", figure, [max(lost[best].values())], "points", **common)
