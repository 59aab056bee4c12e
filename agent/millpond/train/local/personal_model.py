# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): local training of a personal model beside the common one, see ``strategies.apfl``."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from millpond.train.job.spec import WorkSpec
from millpond.train.local.batch_loop import BatchLoop, Part
from millpond.train.local.optimizers import trainable
from millpond.train.local.selection import Selection
from millpond.train.state import flat, layout
from millpond.train.state.flat import Vector
from millpond.train.state.layout import Tensor
from millpond.train.strategies.strategy import LocalRule
from millpond.train.task.task import Task


class MixedLoop(BatchLoop):
    """Trains ``model``, the common one, and a personal copy of it by the gradients of their mixture. Running
    statistics of the mixture are the personal model's.
    """

    def __init__(self, task: Task, model: nn.Module, work: WorkSpec) -> None:
        super().__init__(task, model, work)
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}  # both models have these
        self._personal = copy.deepcopy(model, frozen)
        self._loop = BatchLoop(task, self._personal, replace(work, local=LocalRule()))
        self._layout = flat.describe(self._personal)
        self._alpha = work.local.alpha
        self.tensors = (
            *(replace(tensor, name=f"personal.{tensor.name}") for tensor in self._layout),
            Tensor("personal alpha", (1,), "float32"),
        )

    def begin(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        super().begin(make)
        self._optimizer = make(self._personal)
        self._personal.train()

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        super().end(optimizer)
        super().end(self._optimizer)

    def learn(self, optimizer: torch.optim.Optimizer, parts: Iterator[Part]) -> tuple[float, float]:
        whole = list(parts)
        with self._mixed():
            _, count = self._loop.gradients(batch for _, batch in whole)
        self._follow(count)
        return super().learn(optimizer, iter(whole))

    def _follow(self, count: float) -> None:
        """Take a step of the personal model, and of alpha, with the gradients of the mixture."""
        own = trainable(self._personal)
        pairs = zip(own, trainable(self._model), strict=True)
        moved = [(v.grad, v.detach() - w.detach()) for v, w in pairs if v.grad is not None]
        slope = sum(float((gradient * apart).sum()) for gradient, apart in moved)
        for gradient, _ in moved:
            gradient.mul_(self._alpha)
        self._loop.step(self._optimizer, count)
        if self._work.local.adaptive and count:
            rate = float(self._optimizer.param_groups[0]["lr"])
            self._alpha = min(max(self._alpha - rate * slope, 0.0), 1.0)

    @contextlib.contextmanager
    def _mixed(self) -> Iterator[None]:
        """Have the personal model the values of the mixture."""
        own = trainable(self._personal)
        values = [parameter.data for parameter in own]
        for parameter, common in zip(own, trainable(self._model), strict=True):
            parameter.data = torch.lerp(common.data, parameter.data, self._alpha)
        try:
            yield
        finally:
            for parameter, value in zip(own, values, strict=True):
                parameter.data = value

    @contextlib.contextmanager
    def scored(self, _training: Callable[[], Selection]) -> Iterator[nn.Module]:
        """See BatchLoop: the model is the mixture."""
        with self._mixed():
            yield self._personal

    def restore(self, kept: Vector | None) -> None:
        """See BatchLoop: a device begins with the common model as its personal one."""
        if kept is None:
            kept = np.empty(layout.size(self.tensors), np.float32)
            flat.read(self._model, kept[:-1], self._layout)
            kept[-1] = self._work.local.alpha
        flat.write(self._personal, kept[:-1], self._layout)
        self._alpha = float(kept[-1]) if self._work.local.adaptive else self._work.local.alpha

    def kept(self) -> Vector:
        found = np.empty(layout.size(self.tensors), np.float32)
        flat.read(self._personal, found[:-1], self._layout)
        found[-1] = self._alpha
        return found
