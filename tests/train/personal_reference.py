# SPDX-License-Identifier: Apache-2.0
"""Plain torch references of personalized training, scored on what each client holds out, beside ``simulate``.

As in ``strategy_reference``, a reference replays the batches that the simulation has read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from millpond.train import simulate
from millpond.train.api.simulate import LEAST_SAMPLES
from millpond.train.balance.data_plan import held_count, held_out

from .strategy_reference import COUNTS, RATE, ROUNDS, Batches, Compared, Digits, Recorded, Tensors

BATCH, EPOCHS, HELD, MOMENTUM = 32, 2, 0.25, 0.9


@dataclass
class Client:
    """One device: its samples, and those that it holds out. Its ``kept`` values are its own."""

    model: nn.Module
    part: Recorded
    held: list[int]
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def training(self) -> list[int]:
        return sorted(set(range(len(self.part))) - set(self.held))

    def gradient(self, values: Tensors, batch: list[int]) -> Tensors:
        loss = cross_entropy(self.outputs(values, batch), self.part.labels[batch])
        return list(torch.autograd.grad(loss, list(self.model.parameters())))

    def outputs(self, values: Tensors, batch: list[int]) -> Tensor:
        for parameter, value in zip(self.model.parameters(), values, strict=True):
            parameter.data = value.clone()
        found: Tensor = self.model(self.part.images[batch])
        return found


def moved(values: Tensors, by: Tensors, times: float) -> Tensors:
    return [value + times * each for value, each in zip(values, by, strict=True)]


def mixed(v: Tensors, w: Tensors, alpha: float) -> Tensors:
    return [alpha * a + (1 - alpha) * b for a, b in zip(v, w, strict=True)]


class Sgd:
    """SGD with momentum, new in each round."""

    def __init__(self) -> None:
        self.velocity: Tensors = []

    def step(self, values: Tensors, gradients: Tensors) -> Tensors:
        old = self.velocity or [torch.zeros_like(g) for g in gradients]
        self.velocity = moved(gradients, old, MOMENTUM)
        return moved(values, self.velocity, -RATE)


class Plain:
    """FedAvg, but the parameters with numbers ``local`` stay with their clients."""

    def __init__(self, local: tuple[int, ...] = ()) -> None:
        self.local = local

    def own(self, client: Client, state: Tensors) -> Tensors:
        layers = client.kept.get("layers", {})
        return [layers.get(number, value) for number, value in enumerate(state)]

    def train(self, client: Client, state: Tensors, batches: Batches) -> Tensors:
        optimizer, w = Sgd(), self.own(client, state)
        for batch in batches:
            w = optimizer.step(w, client.gradient(w, batch))
        client.kept["layers"] = {number: w[number] for number in self.local}
        return [
            s if number in self.local else value
            for number, (s, value) in enumerate(zip(state, w, strict=True))
        ]

    def scored(self, client: Client, state: Tensors) -> Tensors:
        return self.own(client, state)


class Apfl(Plain):
    """Algorithm 1 of Deng et al."""

    def __init__(self, *, adaptive: bool) -> None:
        super().__init__()
        self.adaptive = adaptive

    def train(self, client: Client, state: Tensors, batches: Batches) -> Tensors:
        w, v, alpha = state, client.kept.get("v", state), client.kept.get("alpha", 0.5)
        of_w, of_v = Sgd(), Sgd()
        for batch in batches:
            both = client.gradient(mixed(v, w, alpha), batch)
            slope = sum(float(((a - b) * g).sum()) for a, b, g in zip(v, w, both, strict=True))
            own = client.gradient(w, batch)
            v, w = of_v.step(v, [alpha * g for g in both]), of_w.step(w, own)
            if self.adaptive:
                alpha = min(1.0, max(0.0, alpha - RATE * slope))
        client.kept.update(v=v, alpha=alpha)
        return w

    def scored(self, client: Client, state: Tensors) -> Tensors:
        return mixed(client.kept["v"], state, client.kept["alpha"])


class PerFedAvg(Plain):
    """Algorithm 1 of Fallah et al., with 2 parts of a batch in each step, or with 3 the Hessian by
    differences. A batch with fewer groups of samples has fewer parts, which are used again.
    """

    def __init__(self, rate: float, roles: int) -> None:
        super().__init__()
        self.rate, self.roles = rate, roles

    def train(self, client: Client, state: Tensors, batches: Batches) -> Tensors:
        optimizer, w = Sgd(), state
        for parts in in_steps(batches, len(client.training)):
            inner, outer, third = (parts[role % len(parts)] for role in range(3))
            if self.roles == 2:
                inner, outer = parts[0], parts[-1]
            g = client.gradient(moved(w, client.gradient(w, inner), -self.rate), outer)
            if self.roles == 3:
                ahead, behind = (client.gradient(moved(w, g, delta), third) for delta in (0.01, -0.01))
                g = moved(g, moved(ahead, behind, -1.0), -self.rate / 0.02)
            w = optimizer.step(w, g)
        return w

    def scored(self, client: Client, state: Tensors) -> Tensors:
        return moved(state, client.gradient(state, client.training), -self.rate)


@dataclass(frozen=True, slots=True)
class Personalized:
    """Personalized training as a job has it, and how to make the same in plain torch."""

    make: Callable[[], Plain]
    strategy: str | dict[str, Any] = "fedavg"
    local: tuple[str, ...] = ()


INNER = {"name": "perfedavg", "inner_learning_rate": 0.1}
HESSIAN_FREE = {"name": "perfedavg", "inner_learning_rate": 0.02, "variant": "hessian-free"}
PERSONALIZED = {
    "local-layers": Personalized(lambda: Plain((2, 3)), local=("2.*",)),
    "apfl": Personalized(lambda: Apfl(adaptive=False), "apfl"),
    "apfl-adaptive": Personalized(lambda: Apfl(adaptive=True), {"name": "apfl", "alpha": "adaptive"}),
    "perfedavg": Personalized(lambda: PerFedAvg(0.1, 2), INNER),
    "perfedavg-hessian-free": Personalized(lambda: PerFedAvg(0.02, 3), HESSIAN_FREE),
}


def compare(name: str, folder: Path, seed: int = 0, rounds: int = ROUNDS) -> Compared:
    """Train with a strategy and with its reference; ``folder`` is empty."""
    wanted, task = PERSONALIZED[name], Digits(seed)
    for part in task.parts:
        (folder / part).mkdir()
    folders = [folder / str(number) for number in range(len(COUNTS))]
    keys: dict[str, Any] = {"batch": BATCH, "epochs": EPOCHS, "learning_rate": RATE, "local": wanted.local}
    fitted = simulate(
        task,
        folders,
        rounds=rounds,
        seed=seed,
        strategy=wanted.strategy,
        held_out=HELD,
        tell=lambda line: None,
        **keys,
    )
    model = copy.deepcopy(fitted.model).requires_grad_(True)
    clients = [client_of(model, task.parts[str(number)], number) for number in range(len(COUNTS))]
    reference = wanted.make()
    state = replayed(reference, clients, task.first, rounds)
    ends = zip(state, fitted.model.parameters(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in ends)
    found = accuracy(clients, lambda client: reference.scored(client, state))
    first = accuracy(clients, lambda client: task.first)
    return Compared(100 * fitted.devices[-1]["accuracy"], found, first, difference)


def client_of(model: nn.Module, part: Recorded, number: int) -> Client:
    held = held_count(len(part), HELD, LEAST_SAMPLES)
    return Client(model, part, held_out(len(part), f"csd{number}", held).tolist())


def accuracy(clients: list[Client], values: Callable[[Client], Tensors]) -> float:
    """The percentage of all that clients hold out that is classified right."""
    right = 0
    for client in clients:
        outputs = client.outputs(values(client), client.held)
        right += int((outputs.argmax(1) == client.part.labels[client.held]).sum())
    return 100 * (right / sum(len(client.held) for client in clients))


def replayed(reference: Plain, clients: list[Client], state: Tensors, rounds: int) -> Tensors:
    """Return the common model of the reference, trained on the batches that were read."""
    reads = [of_rounds(client, rounds) for client in clients]
    counts = [len(client.training) for client in clients]
    for _ in range(rounds):
        found = [reference.train(c, state, next(read)) for c, read in zip(clients, reads, strict=True)]
        state = [
            torch.stack([w * n for w, n in zip(each, counts, strict=True)]).sum(0) / sum(counts)
            for each in zip(*found, strict=True)
        ]
    return state


def in_steps(read: Batches, samples: int) -> Iterator[Batches]:
    """Yield the parts of each batch: as many as it can hold, and of one pass over the samples."""
    parts: Batches = []
    left = samples
    for part in read:
        if parts and (left == samples or sum(map(len, parts)) + len(part) > BATCH):
            yield parts
            parts = []
        parts.append(part)
        left = left - len(part) or samples
    yield parts


def of_rounds(client: Client, rounds: int) -> Iterator[Batches]:
    """Yield the batches that were read to train in each round, without those of its score."""
    size = len(client.part.read) // rounds
    assert size * rounds == len(client.part.read)
    for number in range(rounds):
        read = client.part.read[number * size : (number + 1) * size]
        trained = [batch for batch in read if not set(batch) & set(client.held)]
        while sum(map(len, trained)) > EPOCHS * len(client.training):
            trained.pop()
        assert sum(map(len, trained)) == EPOCHS * len(client.training)
        yield trained
