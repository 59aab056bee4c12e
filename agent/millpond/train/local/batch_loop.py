# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the loop over batches: forward, backward, step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from millpond.train.balance.curve import Ints
from millpond.train.job.spec import WorkSpec
from millpond.train.local.accelerator import device_of, moved
from millpond.train.local.evaluation import autocast
from millpond.train.local.optimizers import set_mode, trainable
from millpond.train.local.pace import ExchangePace
from millpond.train.local.prefetch import ReadingMeter, prefetched
from millpond.train.local.selection import Selection, batches
from millpond.train.state.flat import Vector
from millpond.train.state.layout import Tensor
from millpond.train.task.made_up import Synthetic
from millpond.train.task.task import Batch, Task

K = TypeVar("K")
Part = tuple[int, Batch]
"""A part of a batch that is computed at once, with the number of the gradient that it is for."""


class BatchLoop:
    """Trains ``model`` with the loss of ``task``, in batches as ``work`` says."""

    roles = 1
    """The number of gradients that a step takes of different parts of a batch."""

    tensors: tuple[Tensor, ...] = ()
    """What it keeps for itself from exchange to exchange."""

    def __init__(self, task: Task, model: nn.Module, work: WorkSpec) -> None:
        self._task, self._model, self._work = task, model, work
        # Gradients of a mean are rounded less often than sums that are divided, which counts in bfloat16.
        self._means = work.accumulate == 1
        self._near: list[torch.Tensor] = []
        self.steps = 0
        """The steps of all runs."""
        self.meter = ReadingMeter()
        """What was read for the runs, and how long they waited for it."""
        self.pace = ExchangePace(lambda _percent: None)
        """How far the exchange is."""

    def begin(self, _make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        """Begin an exchange: the proximal term, if there is one, holds the parameters near their present
        values.
        """
        if self._work.local.proximal:
            self._near = [parameter.detach().clone() for parameter in trainable(self._model)]

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """End an exchange: the parameters take the values that are to be used."""
        set_mode(optimizer, training=False)

    def run(
        self, optimizer: torch.optim.Optimizer, samples: Selection | Synthetic, shuffle: torch.Generator
    ) -> tuple[float, float]:
        """Take a step for each batch of the shuffled samples. Returns the summed loss and its count."""
        total = counted = 0.0
        self._clear(optimizer)
        for parts in self.read(samples, shuffle, self.roles):
            loss, count = self.learn(optimizer, parts)
            total, counted = total + loss, counted + count
        return total, counted

    def read(
        self, samples: Selection | Synthetic, shuffle: torch.Generator, roles: int
    ) -> Iterator[Iterator[Part]]:
        """Yield each batch of the shuffled samples, as the parts that it is read in."""
        work = self._work
        whole = batches(samples.groups, work.batch, work.steps, shuffle)
        wanted = _parts(whole, samples.groups, roles, work.accumulate)
        reading = self._awaited(wanted, samples, lambda part: part[0])
        for (_, role, count), first in reading:
            rest = ((role, batch) for (_, role, _), batch in islice(reading, count - 1))
            yield chain([(role, first)], rest)

    def _awaited(
        self, wanted: Iterable[K], samples: Selection | Synthetic, places_of: Callable[[K], Ints]
    ) -> Iterator[tuple[K, Batch]]:
        """Yield what is ``wanted`` with its batch; the meter counts how long each is waited for."""

        def read(key: K) -> Batch:
            places = places_of(key)
            if samples.in_memory:
                return samples.batch(places)
            return self.meter.read(lambda: samples.batch(places), len(places))

        ahead = self._work.prefetch
        for key, batch in self.meter.batches(prefetched(wanted, read, ahead, samples.threads(ahead))):
            yield key, batch
            self.pace.add(len(places_of(key)))

    def restore(self, kept: Vector | None) -> None:
        """Take back what was ``kept``, laid out as ``tensors``; None before the first exchange."""

    def kept(self) -> Vector:
        """Return what is to be kept, laid out as ``tensors``."""
        return np.empty(0, np.float32)

    @contextlib.contextmanager
    def scored(self, _training: Callable[[], Selection]) -> Iterator[nn.Module]:
        """Have a worker's model to be scored, with the ``training`` samples that it would train on."""
        yield self._model

    def learn(self, optimizer: torch.optim.Optimizer, parts: Iterator[Part]) -> tuple[float, float]:
        """Take a step with the parts of a batch. Returns the summed loss and its count."""
        loss, count = self.gradients(batch for _, batch in parts)
        self.step(optimizer, count)
        return loss, count

    def gradients(self, parts: Iterable[Batch]) -> tuple[float, float]:
        """Add the gradients of the mean loss of some parts. Returns the summed loss and its count."""
        total = counted = 0.0
        for batch in parts:
            loss, count = self._backward(batch, mean=self._means)
            total, counted = total + loss, counted + count
        found = [] if self._means else [p.grad for p in trainable(self._model) if p.grad is not None]
        if counted and found:
            torch._foreach_mul_(found, 1 / counted)
        return total, counted

    def backward(self, samples: Selection | Synthetic) -> tuple[float, float]:
        """Add the sums of the gradients of all samples. Returns the summed loss and its count."""
        loss = count = 0.0
        group_of = np.repeat(np.arange(len(samples.groups)), samples.groups)
        parts = _split(np.arange(len(samples)), group_of, self._work.accumulate)
        for _, batch in self._awaited(parts, samples, lambda places: places):
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

    def step(self, optimizer: torch.optim.Optimizer, count: float) -> None:
        """Take a step with the gradients of a batch that counts ``count``, and clear them."""
        trained = trainable(self._model)
        if count and any(parameter.grad is not None for parameter in trained):
            if self._work.clip_norm is not None or self._near:
                _make_dense(trained)
            self._add_proximal(trained)
            if self._work.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, self._work.clip_norm)
            optimizer.step()
            self.steps += 1
        self._clear(optimizer)

    def _clear(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear all gradients, and what an optimizer of the user's keeps of them."""
        optimizer.zero_grad()
        self._model.zero_grad()  # also what the optimizer leaves out: clipping counts all gradients

    def _add_proximal(self, trained: Sequence[torch.nn.Parameter]) -> None:
        """Add the gradient of the proximal term."""
        for parameter, near in zip(trained, self._near, strict=False):
            pull = (parameter.detach() - near).mul_(self._work.local.proximal)
            # A sparse gradient takes no dense one in.
            parameter.grad = pull if parameter.grad is None else pull.add_(parameter.grad)


def _make_dense(trained: Sequence[nn.Parameter]) -> None:
    """Make sparse gradients dense: torch has no norm and no sum of them."""
    for parameter in trained:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def _parts(
    places: Iterable[Ints], groups: Ints, roles: int, accumulate: int
) -> Iterator[tuple[Ints, int, int]]:
    """Yield the parts of all batches, each with its role, and the number of parts of its batch."""
    if roles == accumulate == 1:
        yield from ((whole, 0, 1) for whole in places)
        return
    group_of = np.repeat(np.arange(len(groups)), groups)
    for whole in places:
        own = _split(whole, group_of, roles)
        found = [(part, role) for role, of in enumerate(own) for part in _split(of, group_of, accumulate)]
        yield from ((part, role, len(found)) for part, role in found)


def _split(places: Ints, group_of: Ints, most: int) -> list[Ints]:
    """Divide a batch into ``most`` parts of about as many samples, or fewer. A part is of whole groups, since
    a gradient, and what a forward pass leaves in the model, tell of it alone; and of more than one sample, of
    which BatchNorm has no variance.
    """
    starts = np.flatnonzero(np.diff(group_of[places], prepend=-1))
    for count in range(min(most, len(starts)), 1, -1):
        nearest = np.searchsorted(starts, np.arange(1, count) * (len(places) / count))
        cuts = np.unique(starts[nearest[nearest < len(starts)]])
        found = np.split(places, cuts)
        if len(found) > 1 and min(map(len, found)) > 1:
            return found
    return [places]
