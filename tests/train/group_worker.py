# SPDX-License-Identifier: Apache-2.0
"""One process of ``test_group``: what to run, in an environment as of torchrun; prints a line of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import millpond.train
from millpond.train.distributed.group import Loader, ProcessGroup

BATCH, EPOCH, EPOCHS = 48, 48 * 16, 4
PRIVATE, PUBLIC = (70, 31, 9), 45
"""Samples of each rank's own, and of everyone's."""
CHANGE = 30
"""The step from which rank 2 is the fastest. Before it is the slowest."""


class Slowed(nn.Module):
    """Takes so many seconds for a sample."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.seconds = nn.Sequential(*layers), 0.0

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(self.seconds * len(images))
        logits: Tensor = self.layers(images)
        return logits


def slowed(seed: int, *between: nn.Module) -> Slowed:
    torch.manual_seed(seed)
    return Slowed(nn.Linear(8, 32), *between, nn.Tanh(), nn.Linear(32, 4))


def data(count: int, seed: int) -> TensorDataset:
    """Rows, labels, and which sample it is."""
    source = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 8, generator=source)
    return TensorDataset(images, torch.randint(0, 4, (count,), generator=source), torch.arange(count))


class Run:
    """Trains ``model`` and notes what became of it."""

    def __init__(self, group: ProcessGroup, model: Slowed, change: int = 0) -> None:
        self._group, self._model, self._change = group, model, change
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.batches: list[tuple[int, ...]] = []

    def epoch(self, loader: Loader) -> list[list[int]]:
        """By step the samples that counted."""
        return list(self._steps(loader))

    def _steps(self, loader: Loader) -> Iterator[list[int]]:
        for images, labels, samples in loader:
            self._slow_down()
            self._optimizer.zero_grad()
            step = self._group.step(cross_entropy(self._model(images), labels, reduction="sum"))
            self._optimizer.step()
            self.batches.append(step.batches)
            yield samples.tolist() if step.batches[self._group.rank] else []

    def _slow_down(self) -> None:
        if self._change:
            slow = (self._group.rank == 2) == (len(self.batches) < self._change)
            self._model.seconds = 0.004 if slow else 0.0005

    @property
    def state(self) -> list[float]:
        """Weights and buffers."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        return list(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).tolist())


def balanced() -> dict[str, Any]:
    """Data of everyone, and then, with another model, each one's own and everyone's in turn."""
    rank = int(dist.get_rank()) if dist.is_initialized() else 0
    dataset, model = data(EPOCH, 5), slowed(rank)
    with millpond.train.group(model) as group:
        run = Run(group, model, CHANGE if group.ranks > 1 else 0)
        epochs = [run.epoch(group.loader(dataset, batch=BATCH)) for _ in range(EPOCHS)]
        seen = {"state": run.state, "epochs": epochs, "batches": run.batches, "samples": group.samples}
        return seen | {"private": private(group.rank) if group.ranks > 1 else None}


def private(rank: int) -> dict[str, Any]:
    own, everyones, model = data(PRIVATE[rank], 20 + rank), data(PUBLIC, 9), slowed(rank)
    with millpond.train.group(model) as group:
        run = Run(group, model)
        mine, public = group.loader(own, private=True, batch=12), group.loader(everyones, batch=8)
        epochs = [[run.epoch(mine), run.epoch(public)] for _ in range(2)]
        return {"epochs": epochs, "state": run.state, "batches": run.batches}


def fixed() -> dict[str, Any]:
    """Twice the same, in a process group of the script's own."""
    dist.init_process_group("gloo")
    states = []
    for _ in range(2):
        dataset, model = data(100, 5), slowed(3, nn.BatchNorm1d(32))
        with millpond.train.group(model, policy="fixed") as group:
            run = Run(group, model)
            run.epoch(group.loader(dataset))
            states.append(run.state)
    still = dist.is_initialized()
    dist.destroy_process_group()
    return {"states": states, "batches": run.batches, "still": still}


def counted() -> dict[str, Any]:
    """Each sample has as many tokens as its label says, and one more."""
    dataset, model = data(60, 5), slowed(3)
    with millpond.train.group(model, policy="fixed") as group:
        optimizer, epoch = torch.optim.SGD(model.parameters(), lr=0.5), []
        for images, labels, samples in group.loader(dataset, batch=20):
            optimizer.zero_grad()
            losses = cross_entropy(model(images), labels, reduction="none")
            step = group.step(((labels + 1) * losses).sum(), int((labels + 1).sum()))
            optimizer.step()
            epoch.append(samples.tolist() if step.batches[group.rank] else [])
        return {"state": Run(group, model).state, "epoch": epoch}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"balanced": balanced, "counted": counted, "fixed": fixed}[sys.argv[1]]()))
