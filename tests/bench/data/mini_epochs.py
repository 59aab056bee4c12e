# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): accuracy of mini-epochs against plain training with as many visits of samples."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import millpond.data
from bench.experiment import Run
from bench.rows import Row, summary
from millpond.data.tier.mini_epochs import MiniEpoch
from millpond.train.repeats import RepeatRule, rule_of

TITLE = "accuracy of repeated mini-epochs"
SEEDS = range(5)
_VISITS, _PARTS, _BATCH = 64, 8, 32
"""Visits of each sample, mini-epochs of a pass, samples of a batch."""
_RULES: dict[str, int | str] = {"rf16": 16, "score": "score", "bands": "bands"}
Split = tuple[Tensor, Tensor, Tensor, Tensor]


def measure(run: Run) -> list[Row]:
    """Train plainly, with fixed and with adaptive repeats, on sorted and unsorted storage."""
    torch.set_num_threads(1)  # the model is small: more would wait for each other
    lost: dict[str, dict[str, float]] = {name: {} for name in _RULES}
    seeds, visits = (SEEDS[:1], 4) if run.quick else (SEEDS, _VISITS)
    for data in ("digits", "synthetic"):
        for storage in ("sorted", "unsorted"):
            plain, found = [], {name: list[float]() for name in _RULES}
            for seed in seeds:
                split = _split(data, seed, in_order=storage == "sorted")
                plain.append(_accuracy(split, seed, _plain(split, seed, visits)))
                for name, rule in _RULES.items():
                    found[name].append(_repeated(split, seed, rule_of(rule), visits))
            for name, values in found.items():
                lost[name][f"{data}, {storage}"] = 100 * (fmean(plain) - fmean(values))
            told = ", ".join(f"{name} {100 * fmean(values):.1f}" for name, values in found.items())
            run.say(f"{data}, {storage}: plain {100 * fmean(plain):.1f} %, {told}")
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


def _split(name: str, seed: int, *, in_order: bool) -> Split:
    rng = np.random.default_rng(seed)
    if name == "digits":
        found = load_digits()
        inputs, labels = found.data.astype(np.float32) / 16, found.target
    else:
        centres = rng.normal(size=(10, 32))
        labels = rng.integers(0, 10, 3000)
        inputs = (centres[labels] + 1.3 * rng.normal(size=(3000, 32))).astype(np.float32)
    order = rng.permutation(len(labels))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    train = train[np.argsort(labels[train], kind="stable")] if in_order else train
    x, y = torch.from_numpy(inputs), torch.from_numpy(labels)
    return x[train], y[train], x[test], y[test]


def _plain(split: Split, seed: int, visits: int) -> Iterator[Tensor]:
    """Yield the batches of plain training, as indices."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(visits):
        yield from torch.split(torch.randperm(len(split[0]), generator=rng), _BATCH)


def _model(split: Split, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(split[0].shape[1], 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _score(model: nn.Module, split: Split) -> float:
    with torch.no_grad():
        return float((model(split[2]).argmax(1) == split[3]).double().mean())


def _accuracy(split: Split, seed: int, batches: Iterator[Tensor]) -> float:
    model, optimizer = _model(split, seed)
    for batch in batches:
        _step(model, optimizer, split[0][batch], split[1][batch])
    return _score(model, split)


def _samples(mini_epoch: MiniEpoch) -> list[tuple[Tensor, Tensor]]:
    return [mini_epoch[index] for index in range(len(mini_epoch))]


def _repeated(split: Split, seed: int, rule: RepeatRule, wanted: int) -> float:
    """Train on mini-epochs until as many samples were visited. A tenth of them scores the repetitions."""
    model, optimizer = _model(split, seed)
    count = len(split[0])
    visits, held = 0, torch.arange(seed % 10, count, 10)
    rng = torch.Generator().manual_seed(seed)
    with millpond.data.mini_epochs(
        TensorDataset(split[0], split[1]),
        size=-(-count // _PARTS),
        repeat=rule,
        passes=wanted,
        seed=seed,
    ) as mini_epochs:
        for mini_epoch in mini_epochs:
            inputs, labels = (torch.stack(column) for column in zip(*_samples(mini_epoch), strict=True))
            for batch in torch.split(torch.randperm(len(labels), generator=rng), _BATCH):
                _step(model, optimizer, inputs[batch], labels[batch])
            with torch.no_grad():
                mini_epochs.report(float(nn.functional.cross_entropy(model(split[0][held]), split[1][held])))
            visits += len(labels)
            if visits >= wanted * count:
                break
    return _score(model, split)
