# SPDX-License-Identifier: Apache-2.0
"""Plain torch references of the strategies, on digits that uneven clients hold, beside ``simulate``.

A reference replays the batches that the simulation has read, from the same first values; all else is its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from millpond.train import simulate

COUNTS = (48, 80, 160, 320, 640)
TESTED, ROUNDS, RATE = 360, 12, 0.05
Tensors = list[Tensor]
Batches = list[list[int]]


class Recorded:
    """Digits whose reads are noted in ``read``."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self.read: Batches = []

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        self.read.append(indices)
        return self.images[indices], self.labels[indices]


class Digits:
    """A task whose folders hold 48 to 640 digits; the classes of a folder are few, or all."""

    def __init__(self, seed: int = 0) -> None:
        from sklearn.datasets import load_digits  # slow to import

        bunch = load_digits()
        images, labels = (bunch.data / 16).astype(np.float32), bunch.target.astype(np.int64)
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(labels))
        test, train = order[:TESTED], order[TESTED : TESTED + sum(COUNTS)]
        half = len(train) // 2  # half of them sorted by label, so that clients are unlike each other
        train[:half] = train[:half][np.argsort(labels[train[:half]], kind="stable")]
        ends = np.cumsum(COUNTS)[:-1]
        parts = [*np.split(train, ends), test]
        names = [*map(str, range(len(COUNTS))), "test"]
        self.parts = {
            name: Recorded(torch.from_numpy(images[part]), torch.from_numpy(labels[part]))
            for name, part in zip(names, parts, strict=True)
        }
        self.first: Tensors = []

    def model(self) -> nn.Module:
        made = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.first = [parameter.detach().clone() for parameter in made.parameters()]
        return made

    def dataset(self, folder: Path, split: str) -> Recorded:
        return self.parts[folder.name]


def accuracy(model: nn.Module, part: Recorded) -> float:
    """The percentage of the digits that are classified right."""
    with torch.no_grad():
        return 100 * float((model(part.images).argmax(1) == part.labels).float().mean())


@dataclass(frozen=True, slots=True)
class Local:
    """Local training: SGD with momentum, and a proximal term."""

    momentum: float = 0.9
    mu: float = 0.0

    def train(self, model: nn.Module, state: Tensors, part: Recorded, batches: Batches) -> Tensors:
        """Train from ``state``; returns what was taken away from each parameter."""
        parameters = list(model.parameters())
        for parameter, value in zip(parameters, state, strict=True):
            parameter.data = value.clone()
        velocity: Tensors = []
        for batch in batches:
            loss = cross_entropy(model(part.images[batch]), part.labels[batch])
            squares = [((p - w) ** 2).sum() for p, w in zip(parameters, state, strict=True)]
            loss = loss + self.mu / 2 * torch.stack(squares).sum()
            gradients = torch.autograd.grad(loss, parameters)
            old = velocity or [torch.zeros_like(g) for g in gradients]
            velocity = [self.momentum * v + g for v, g in zip(old, gradients, strict=True)]
            for parameter, v in zip(parameters, velocity, strict=True):
                parameter.data = parameter.data - RATE * v
        return [w - p.data for w, p in zip(state, parameters, strict=True)]

    def weight_of_gradients(self, steps: int) -> float:
        """||a|| of the paper, for momentum or a proximal term."""
        assert not (self.momentum and self.mu)
        if self.momentum:
            p = self.momentum
            return (steps - p * (1 - p**steps) / (1 - p)) / (1 - p)
        if self.mu:
            return sum((1 - RATE * self.mu) ** k for k in range(steps))
        return float(steps)


Server = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]
"""The new value of a parameter, of its value, the combined difference and what is kept for it."""


def averaged(w: Tensor, d: Tensor, kept: dict[str, Tensor]) -> Tensor:
    return w - d


def with_momentum(w: Tensor, d: Tensor, kept: dict[str, Tensor]) -> Tensor:
    kept["v"] = 0.5 * kept.get("v", torch.zeros_like(d)) + d
    return w - kept["v"]


def adaptive(rate: float, beta1: float, second: Callable[[Tensor, Tensor], Tensor]) -> Server:
    """Algorithm 2 of Reddi et al., with tau of 0.001."""

    def server(w: Tensor, d: Tensor, kept: dict[str, Tensor]) -> Tensor:
        delta = -d
        kept["m"] = beta1 * kept.get("m", torch.zeros_like(d)) + (1 - beta1) * delta
        kept["v"] = second(kept.get("v", torch.full_like(d, 1e-6)), delta**2)
        return w + rate * kept["m"] / (kept["v"].sqrt() + 1e-3)

    return server


def torch_adam(w: Tensor, d: Tensor, kept: dict[str, Tensor]) -> Tensor:
    """Adam with its correction of bias, rate 0.01."""
    kept["t"] = kept.get("t", torch.zeros(())) + 1
    kept["m"] = 0.9 * kept.get("m", torch.zeros_like(d)) + 0.1 * d
    kept["v"] = 0.999 * kept.get("v", torch.zeros_like(d)) + 0.001 * d**2
    m, v = kept["m"] / (1 - 0.9 ** kept["t"]), kept["v"] / (1 - 0.999 ** kept["t"])
    return w - 0.01 * m / (v.sqrt() + 1e-8)


Combine = Callable[[Sequence[Tensor], Sequence[int], Sequence[float]], Tensor]
"""The combination of differences, with the clients' samples and weights of gradients."""


def mean(found: Sequence[Tensor], counts: Sequence[int], a: Sequence[float]) -> Tensor:
    return torch.stack([d * n / sum(counts) for d, n in zip(found, counts, strict=True)]).sum(0)


def normalized(found: Sequence[Tensor], counts: Sequence[int], a: Sequence[float]) -> Tensor:
    effective = sum(each * n for each, n in zip(a, counts, strict=True)) / sum(counts)
    return effective * mean([d / each for d, each in zip(found, a, strict=True)], counts, a)


def median(found: Sequence[Tensor], counts: Sequence[int], a: Sequence[float]) -> Tensor:
    return torch.stack(list(found)).median(0).values


def trimmed(found: Sequence[Tensor], counts: Sequence[int], a: Sequence[float]) -> Tensor:
    return torch.stack(list(found)).sort(0).values[1:-1].mean(0)  # one of five at either end


@dataclass(frozen=True, slots=True)
class Reference:
    """A strategy as a job has it, and the same in plain torch."""

    strategy: str | dict[str, Any]
    server: Server = averaged
    combine: Combine = mean
    local: Local = field(default_factory=Local)
    training: dict[str, Any] = field(default_factory=dict)


YOGI = adaptive(0.03, 0.9, lambda v, s: v - 0.01 * s * torch.sign(v - s))
REFERENCES = {
    "fedavg": Reference("fedavg"),
    "fedavgm": Reference({"name": "fedavgm", "momentum": 0.5}, with_momentum),
    "fedprox": Reference({"name": "fedprox", "mu": 0.5}, local=Local(mu=0.5)),
    "fednova": Reference("fednova", averaged, normalized, Local(0.5), {"momentum": 0.5}),
    "fednova-plain": Reference("fednova", averaged, normalized, Local(0.0), {"momentum": 0.0}),
    "fednova-proximal": Reference(
        {"name": "fednova", "mu": 0.5}, averaged, normalized, Local(0.0, 0.5), {"momentum": 0.0}
    ),
    "fedadam": Reference(
        {"name": "fedadam", "learning_rate": 0.03}, adaptive(0.03, 0.9, lambda v, s: 0.99 * v + 0.01 * s)
    ),
    "fedyogi": Reference({"name": "fedyogi", "learning_rate": 0.03}, YOGI),
    "fedadagrad": Reference("fedadagrad", adaptive(0.1, 0.0, lambda v, s: v + s)),
    "fedopt": Reference({"name": "fedopt", "optimizer": "Adam", "learning_rate": 0.01}, torch_adam),
    "median": Reference("median", combine=median),
    "trimmed": Reference("trimmed", combine=trimmed),
}


@dataclass(frozen=True, slots=True)
class Compared:
    """Percentages of right answers, and the largest difference between two weights."""

    ours: float
    reference: float
    first: float
    difference: float


def compare(name: str, folder: Path, seed: int = 0, rounds: int = ROUNDS) -> Compared:
    """Train with a strategy and with its reference; ``folder`` is empty."""
    wanted, task = REFERENCES[name], Digits(seed)
    for part in task.parts:
        (folder / part).mkdir()
    clients = [folder / str(number) for number in range(len(COUNTS))]
    keys = {"batch": 16, "epochs": 2, "learning_rate": RATE, **wanted.training}
    fitted = simulate(
        task, clients, rounds=rounds, seed=seed, strategy=wanted.strategy, tell=lambda line: None, **keys
    )
    model = copy.deepcopy(fitted.model)
    replayed(wanted, task, model, rounds)
    pairs = zip(model.parameters(), fitted.model.parameters(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    test = task.parts["test"]
    found = accuracy(fitted.model, test), accuracy(model, test)
    for parameter, value in zip(model.parameters(), task.first, strict=True):
        parameter.data = value
    return Compared(*found, accuracy(model, test), difference)


def replayed(wanted: Reference, task: Digits, model: nn.Module, rounds: int) -> None:
    """Train ``model`` as the reference does, on the batches that were read."""
    parts = [task.parts[str(number)] for number in range(len(COUNTS))]
    reads = [_by_round(part.read, rounds) for part in parts]
    state, kept, a = task.first, [dict[str, Tensor]() for _ in task.first], list[float]()
    for _ in range(rounds):
        batches = [next(read) for read in reads]
        found = [
            wanted.local.train(model, state, part, own) for part, own in zip(parts, batches, strict=True)
        ]
        if wanted.combine is normalized:
            a = [wanted.local.weight_of_gradients(len(own)) for own in batches]
        state = [
            wanted.server(w, wanted.combine([each[number] for each in found], COUNTS, a), kept[number])
            for number, w in enumerate(state)
        ]
    for parameter, value in zip(model.parameters(), state, strict=True):
        parameter.data = value


def _by_round(read: Batches, rounds: int) -> Iterator[Batches]:
    size = len(read) // rounds
    assert size * rounds == len(read)
    return (read[number * size : (number + 1) * size] for number in range(rounds))
