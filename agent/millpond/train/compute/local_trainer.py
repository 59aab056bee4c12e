# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, psutil): a worker's part of an exchange: gradients, or the difference of local training."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import psutil
import torch

from millpond.train.balance.curve import Ints
from millpond.train.compute.evaluation import autocast, evaluate
from millpond.train.compute.optimizers import Schedule, make_optimizer, trainable
from millpond.train.compute.prefetch import prefetched
from millpond.train.compute.selection import SampleFolders, Selection, Synthetic, batches
from millpond.train.determinism import generators
from millpond.train.job.spec import WorkSpec
from millpond.train.protocol import Update, Work
from millpond.train.state.flat import Vector
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.task.sums import LOSS, Sums
from millpond.train.task.task import Batch, Task

_CHECKED = 16
"""Exchanges between two checks that the model has not changed its parameters itself."""


class LocalTrainer:
    """Trains the model of ``parameters`` on a worker's samples as ``work`` says, one exchange at a time."""

    def __init__(
        self, parameters: FlatParameters, task: Task, samples: SampleFolders, work: WorkSpec
    ) -> None:
        self.parameters, self._task, self._samples, self._work = parameters, task, samples, work
        # Gradients of a mean are rounded less often than sums that are divided, which counts in bfloat16.
        self._means = work.passes > 0 and work.accumulate == 1
        self._schedule: Schedule | None = None
        self._exchanges = 0
        self._process = psutil.Process()
        _forget_peak()

    def run(self, request: Work, state: Vector) -> Update:
        """Train from ``state``; the values of the update are then in ``parameters.sums``. Raises DataError
        for samples that are not there, and any exception of the task.
        """
        started, used = time.perf_counter(), self._used()
        generators.plant(request.draws or request.seed)
        self.parameters.load(state)
        if request.held_out:
            count, sums, measured = self._evaluate()
        else:
            count, sums, measured = self._answer(request, state)
        seconds = time.perf_counter() - started
        busy = math.nan if seconds <= 0 else 1 - (self._used() - used) / seconds / torch.get_num_threads()
        return Update(request.exchange, count, *measured, seconds, min(max(busy, 0.0), 1.0), _peak(), sums)

    def _evaluate(self) -> tuple[int, Sums, tuple[float, float, float]]:
        if not any(self._samples.held):
            return 0, {}, (0.0, 0.0, 0.0)
        samples = self._samples.held_out()
        return len(samples), evaluate(self.parameters.model, self._task, samples, self._work), (0.0, 0.0, 0.0)

    def _answer(self, request: Work, state: Vector) -> tuple[int, Sums, tuple[float, float, float]]:
        """Return the number of samples, the loss, and weight, largest value and norm of the update."""
        made_up = request.synthetic
        chosen = self._samples.synthetic(made_up) if made_up else self._samples.take(request)
        self.parameters.model.train()
        if self._work.passes:
            loss, count = self._train(chosen, request)
            weight = float(len(chosen))
            largest, norm = self.parameters.gather_differences(state, len(chosen))
        else:
            loss, count = self._differentiate(chosen, state)
            weight = count
            largest, norm = self.parameters.gather_gradients(weight)
        if made_up:  # its values are of no use, and may not be finite
            return made_up, {LOSS: (0.0, 1.0)}, (1.0, 0.0, 0.0)
        return len(chosen), {LOSS: (loss, count)}, (weight, largest, norm)

    def _differentiate(self, chosen: Selection | Synthetic, state: Vector) -> tuple[float, float]:
        """Compute the sums of gradients over the samples. Returns the summed loss and its count."""
        self.parameters.clear()
        loss = count = 0.0
        for _, batch in prefetched(
            _split(np.arange(len(chosen)), self._work.accumulate), chosen.batch, self._work.prefetch
        ):
            part, counted = self._backward(batch)
            loss, count = loss + part, count + counted
        if self._exchanges % _CHECKED == 0:  # a look at the whole model
            self.parameters.check_unchanged(state)
        self._exchanges += 1
        self.parameters.check_bound()
        return loss, count

    def _backward(self, batch: Batch) -> tuple[float, float]:
        """Add the gradients of the summed loss of a batch, or of its mean in local training by whole batches.
        Returns that sum and its count.
        """
        with autocast(self._work):
            loss, count = self._task.loss(self.parameters.model, batch)
        (loss / count if self._means and count else loss).backward()  # type: ignore[no-untyped-call]
        return loss.item(), count

    def _train(self, chosen: Selection | Synthetic, request: Work) -> tuple[float, float]:
        """Train locally. Returns the summed loss of one pass and its count, the means over all passes. The
        optimizer is new each time: momentum that a worker kept would pull it away from the average.
        """
        work, total, counted = self._work, 0.0, 0.0
        shuffle = torch.Generator().manual_seed(request.seed)
        optimizer = make_optimizer(self.parameters.model, work.optimizer, self._task)
        self._schedule = self._schedule or Schedule(optimizer, work.scheduler, work.total, self._task)
        self._schedule.set(optimizer, request.epoch)
        optimizer.zero_grad()
        for _ in range(work.passes):
            samples = 0.0  # that the batch counts so far
            places = _parts(batches(chosen.groups, work.batch, work.steps, shuffle), work.accumulate)
            for (_, last), batch in prefetched(places, lambda part: chosen.batch(part[0]), work.prefetch):
                loss, count = self._backward(batch)
                total, counted, samples = total + loss, counted + count, samples + count
                if last:
                    self._step(optimizer, samples)
                    samples = 0.0
        self.parameters.check_bound()
        return total / work.passes, counted / work.passes

    def _step(self, optimizer: torch.optim.Optimizer, count: float) -> None:
        """Take a step with the gradients of a batch that counts ``count``."""
        trained = trainable(self.parameters.model)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        if count and gradients:
            if not self._means:
                torch._foreach_mul_(gradients, 1 / count)
            if self._work.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, self._work.clip_norm)
            optimizer.step()
        optimizer.zero_grad()

    def _used(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


def _split(places: Ints, parts: int) -> list[Ints]:
    """Divide the places of a batch into parts for ``backward``."""
    return np.array_split(places, min(parts, len(places)))


def _parts(places: Iterable[Ints], accumulate: int) -> Iterator[tuple[Ints, bool]]:
    """Yield the parts of all batches, and whether each is the last of its batch."""
    for whole in places:
        *before, last = _split(whole, accumulate)
        yield from ((part, False) for part in before)
        yield last, True


def _forget_peak() -> None:
    """Reset the high-water mark of memory: loading the samples may have taken more than steps do."""
    with contextlib.suppress(OSError):  # then the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Return the high-water mark of memory in bytes since ``_forget_peak``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
