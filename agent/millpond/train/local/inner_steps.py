# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): local training for a model that is good one step later, see ``strategies.perfedavg``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from millpond.train.job.spec import WorkSpec
from millpond.train.local.batch_loop import BatchLoop, Part
from millpond.train.local.optimizers import trainable
from millpond.train.local.selection import Selection
from millpond.train.task.task import Batch, Task

Gradients = Sequence[Tensor | None]


class InnerStepLoop(BatchLoop):
    """Takes steps with gradients after an inner step. The loss that it returns is that after it, too."""

    def __init__(self, task: Task, model: nn.Module, work: WorkSpec) -> None:
        super().__init__(task, model, work)
        self._rate, self._delta = work.local.inner_rate, work.local.delta
        self.roles = 3 if self._delta else 2

    def learn(self, optimizer: torch.optim.Optimizer, parts: Iterator[Part]) -> tuple[float, float]:
        inner, outer, *third = _divided(parts, self.roles)
        free = trainable(self._model)
        place = [parameter.detach().clone() for parameter in free]
        self.gradients(inner)
        _move(free, place, _taken(free), -self._rate)
        loss, count = self.gradients(outer)
        found = _taken(free)
        for part in third:
            found = self._without_curvature(free, place, found, part)
        _move(free, place, found, 0.0)
        for parameter, gradient in zip(free, found, strict=True):
            parameter.grad = gradient
        self.step(optimizer, count)
        return loss, count

    def _without_curvature(
        self, free: Sequence[nn.Parameter], place: Sequence[Tensor], found: Gradients, part: Sequence[Batch]
    ) -> Gradients:
        """Return gradients less the inner rate times their product with the Hessian."""
        sides = []
        for delta in (self._delta, -self._delta):
            _move(free, place, found, delta)
            self.gradients(part)
            sides.append(_taken(free))
        factor = self._rate / (2 * self._delta)
        return [
            g if g is None or ahead is None or behind is None else g - factor * (ahead - behind)
            for g, ahead, behind in zip(found, *sides, strict=True)
        ]

    @contextlib.contextmanager
    def scored(self, training: Callable[[], Selection]) -> Iterator[nn.Module]:
        """See BatchLoop: the model is as after an inner step with all samples of ``training``."""
        self._model.train()
        free, count = trainable(self._model), 0.0
        place = [parameter.detach().clone() for parameter in free]
        for parts in self.read(training(), torch.Generator().manual_seed(0), 1):
            count += sum(self._backward(batch, mean=False)[1] for _, batch in parts)
        _move(free, place, _taken(free), -self._rate / (count or 1.0))
        try:
            yield self._model
        finally:
            _move(free, place, place, 0.0)


def _divided(parts: Iterator[Part], roles: int) -> list[list[Batch]]:
    """Return the parts by role; where those of some are missing, several roles have the same ones."""
    found: dict[int, list[Batch]] = {}
    for role, batch in parts:
        found.setdefault(role, []).append(batch)
    return [found[role % len(found)] for role in range(roles)]


def _taken(free: Sequence[nn.Parameter]) -> Gradients:
    """Take the gradients away from the parameters."""
    found = [parameter.grad for parameter in free]
    for parameter in free:
        parameter.grad = None
    return found


def _move(free: Sequence[nn.Parameter], place: Sequence[Tensor], by: Gradients, times: float) -> None:
    """Set the parameters to ``place`` and so many times ``by``."""
    for parameter, value, gradient in zip(free, place, by, strict=True):
        parameter.data.copy_(value)
        if gradient is not None and times:
            parameter.data.add_(gradient, alpha=times)
