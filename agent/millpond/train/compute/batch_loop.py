# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the loop over batches: forward, backward, step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from millpond.train.balance.curve import Ints
from millpond.train.compute.accelerator import device_of, moved
from millpond.train.compute.evaluation import autocast
from millpond.train.compute.optimizers import trainable
from millpond.train.compute.prefetch import prefetched
from millpond.train.compute.selection import Selection, Synthetic, batches
from millpond.train.job.spec import WorkSpec
from millpond.train.task.task import Batch, Task


class BatchLoop:
    """Trains ``model`` with the loss of ``task``, in batches as ``work`` says."""

    def __init__(self, task: Task, model: nn.Module, work: WorkSpec) -> None:
        self._task, self._model, self._work = task, model, work
        # Gradients of a mean are rounded less often than sums that are divided, which counts in bfloat16.
        self._means = work.accumulate == 1
        self._near: list[torch.Tensor] = []
        self.steps = 0
        """The steps of all runs."""

    def hold(self) -> None:
        """Have the proximal term, if there is one, hold the parameters near their present values."""
        if self._work.local.proximal:
            self._near = [parameter.detach().clone() for parameter in trainable(self._model)]

    def run(
        self, optimizer: torch.optim.Optimizer, samples: Selection | Synthetic, shuffle: torch.Generator
    ) -> tuple[float, float]:
        """Take a step for each batch of the shuffled samples. Returns the summed loss and its count."""
        work, total, counted, whole = self._work, 0.0, 0.0, 0.0
        self._model.zero_grad()
        parts = _parts(batches(samples.groups, work.batch, work.steps, shuffle), work.accumulate)
        for (_, last), batch in prefetched(parts, lambda part: samples.batch(part[0]), work.prefetch):
            loss, count = self._backward(batch, mean=self._means)
            total, counted, whole = total + loss, counted + count, whole + count
            if last:
                self._step(optimizer, whole)
                whole = 0.0
        return total, counted

    def backward(self, samples: Selection | Synthetic) -> tuple[float, float]:
        """Add the sums of the gradients of all samples. Returns the summed loss and its count."""
        loss = count = 0.0
        parts = _split(np.arange(len(samples)), self._work.accumulate)
        for _, batch in prefetched(parts, samples.batch, self._work.prefetch):
            part, counted = self._backward(batch, mean=False)
            loss, count = loss + part, count + counted
        return loss, count

    def _backward(self, batch: Batch, *, mean: bool) -> tuple[float, float]:
        """Add the gradients of the summed loss of a batch, or of its ``mean``. Returns that sum and its
        count.
        """
        device = device_of(self._model)
        with autocast(self._work, device):
            loss, count = self._task.loss(self._model, moved(batch, device))
        (loss / count if mean and count else loss).backward()  # type: ignore[no-untyped-call]
        return loss.item(), count

    def _step(self, optimizer: torch.optim.Optimizer, count: float) -> None:
        """Take a step with the gradients of a batch that counts ``count``."""
        trained = trainable(self._model)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        if count and gradients:
            if not self._means:
                torch._foreach_mul_(gradients, 1 / count)
            self._add_proximal(trained)
            if self._work.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, self._work.clip_norm)
            optimizer.step()
            self.steps += 1
        self._model.zero_grad()  # also what a task's optimizer leaves out: clipping counts all gradients

    def _add_proximal(self, trained: Sequence[torch.nn.Parameter]) -> None:
        """Add the gradient of the proximal term."""
        for parameter, near in zip(trained, self._near, strict=False):
            pull = (parameter.detach() - near).mul_(self._work.local.proximal)
            parameter.grad = pull if parameter.grad is None else parameter.grad.add_(pull)


def _split(places: Ints, parts: int) -> list[Ints]:
    # BatchNorm has no variance of one sample
    return np.array_split(places, min(parts, max(1, len(places) // 2)))


def _parts(places: Iterable[Ints], accumulate: int) -> Iterator[tuple[Ints, bool]]:
    """Yield the parts of all batches, and whether each is the last of its batch."""
    for whole in places:
        *before, last = _split(whole, accumulate)
        yield from ((part, False) for part in before)
        yield last, True
