# SPDX-License-Identifier: Apache-2.0
"""Every strategy with every way in which updates come, on models whose state is of all kinds, against one
process of plain torch with all samples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from millpond.aggregate.encoding.layout import Encoding
from millpond.host.jobs.training.collection import ALL_COUNT, LatePolicy
from millpond.train.determinism import generators
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.strategies import catalogue
from millpond.train.strategies.catalogue import unfit_for_lateness

from ..effort import is_full
from .rounds import Rounds, Run, run_buffered, run_together, run_with_a_late_device

ROUNDS, DEVICES, SAMPLES, RATE, BATCH = 16, 3, 96, 0.3, 16
WORDS, LENGTH = 12, 6


@pytest.fixture(scope="module", autouse=True)
def deterministic() -> None:
    generators.be_deterministic(1)


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x + self.other(torch.relu(self.one(x))))
        return found


class Frozen(nn.Sequential):
    """A random layer that is not trained, and a constant mask."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
        self[0].requires_grad_(False)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))


class Experts(nn.Module):
    """No sample comes to the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.experts[0](x)
        return found


class Words(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(WORDS, 8, sparse=True), nn.Flatten(), nn.Linear(8 * LENGTH, 2))


def statistics() -> nn.Module:
    """Running statistics of raw columns: variances of 0.001, far below the first value, to a million."""
    return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


class Points:
    """Points on two sides of a plane, or words whose first one tells."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.model = build

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batchnorm": statistics,
    "layernorm": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)),
    "tied": Tied,
    "frozen": Frozen,
    "sparse": Words,
    "unused": Experts,
}


class Way(NamedTuple):
    run: Run
    late: LatePolicy = ALL_COUNT
    encoding: Encoding | None = None
    rounds: int = ROUNDS
    passes: int = 1


CARRY, BUFFER = LatePolicy(True, True), LatePolicy(True, True, None, 2)
WAYS = {
    "mean": Way(run_together),
    "buffer": Way(run_buffered, BUFFER, None, 2 * ROUNDS, passes=2),
    "carry": Way(run_with_a_late_device, CARRY, passes=2),
    "int8": Way(run_together, ALL_COUNT, Encoding("int8")),
    "top-k": Way(run_together, ALL_COUNT, Encoding("top-k", 0.2), 2 * ROUNDS),
}
KEYS: dict[str, dict[str, Any]] = {
    "fedavgm": {"momentum": 0.5, "learning_rate": 0.5},
    "fedadam": {"learning_rate": 0.03},
    "fedyogi": {"learning_rate": 0.03},
    "fedopt": {"optimizer": {"name": "SGD", "momentum": 0.5, "weight_decay": 1e-3}, "learning_rate": 0.5},
}


def drawn(kind: str, seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(seed)
    if kind == "sparse":
        words = torch.from_numpy(rng.integers(0, WORDS, (count, LENGTH)))
        return list(zip(words, words[:, 0] % 2, strict=True))
    x = rng.normal(size=(8 * count, 8))
    side = x @ np.linspace(-1, 1, 8)
    x, side = (each[np.abs(side) > 0.8][:count] for each in (x, side))
    if kind == "batchnorm":
        x = (x + 1) * np.geomspace(0.03, 1000, 8)
    return list(zip(torch.from_numpy(x.astype(np.float32)), torch.from_numpy((side > 0) * 1), strict=True))


def accuracy(model: nn.Module, kind: str) -> float:
    inputs, labels = (torch.stack(each) for each in zip(*drawn(kind, 99, 500), strict=True))
    with torch.no_grad():
        outputs = model.eval()(inputs)
    assert outputs.isfinite().all()
    return float((outputs.argmax(1) == labels).float().mean())


@functools.cache
def plain(kind: str) -> float:
    """Return the accuracy after as many epochs in one process."""
    generators.plant(1)
    model, samples = MODELS[kind](), [s for n in range(DEVICES) for s in drawn(kind, n, SAMPLES)]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    task, loader = Points(MODELS[kind]), torch.utils.data.DataLoader(samples, BATCH, shuffle=True)
    for _ in range(ROUNDS):
        for batch in loader:
            loss, count = task.loss(model.train(), batch)
            optimizer.zero_grad()
            (loss / count).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return accuracy(model, kind)


def combinations() -> list[tuple[str, str, str]]:
    """Return all. Without effort each strategy has one kind of state by each way, so that a way has all kinds
    among the strategies; where late updates count, as not all do, averaging has all kinds.
    """
    found = []
    for number, name in enumerate(catalogue.STRATEGIES):
        strategy = catalogue.STRATEGIES[name]()
        for place, way in enumerate(WAYS):
            late = WAYS[way].late.discounted
            if late and unfit_for_lateness(strategy.combine, strategy.local, repeats=way == "buffer"):
                continue
            kinds = list(MODELS)
            few = kinds if name == "fedavg" and late else [kinds[(number + place) % len(kinds)]]
            few = [*few, "batchnorm"] if way == "mean" else few
            found += [(name, way, kind) for kind in kinds if is_full() or kind in few]
    return found


@pytest.mark.parametrize(("name", "way", "kind"), combinations())
def test_the_model_is_as_good_as_one_of_plain_torch(name: str, way: str, kind: str) -> None:
    strategy = catalogue.check({"name": name, **KEYS.get(name, {})}, "strategy")
    assert strategy is not None
    how, optimizer = WAYS[way], OptimizerSpec("SGD", RATE)
    model, local = ModelSpec("x:y"), strategy.local
    work = WorkSpec("job", model, True, passes=how.passes, batch=BATCH, optimizer=optimizer, local=local)
    parts = [drawn(kind, rank, SAMPLES) for rank in range(DEVICES)]
    job = Checked(Points(MODELS[kind]), parts, work, strategy, late=how.late, encoding=how.encoding)
    with contextlib.closing(job):
        how.run(job, how.rounds)
    assert accuracy(job.average.model, kind) >= plain(kind) - 0.01


class Checked(Rounds):
    """Looks at the state after each round."""

    first: dict[str, Tensor] | None = None

    def begin(self) -> None:
        """See Rounds."""
        state = self.average.model.state_dict()
        self.first = self.first or {key: value.clone() for key, value in state.items()}
        check_state(self.average.model, self.first)
        super().begin()


def check_state(model: nn.Module, first: dict[str, Tensor]) -> None:
    """Check that variances and counts are such, and that nothing else than training changes anything."""
    for name, value in model.state_dict().items():
        if name.endswith("running_var"):
            assert (value > 0).all(), name
        if name.endswith("num_batches_tracked"):
            assert value >= first[name], name
        if name == "mask" or name.startswith("experts.1") or (isinstance(model, Frozen) and name[0] == "0"):
            assert torch.equal(value, first[name]), name
