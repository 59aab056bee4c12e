# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, psutil): a worker's part of an exchange: gradients, or the difference of local training."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

import psutil
import torch
from torch.nn.functional import cross_entropy

from millpond.train.compute.optimizers import make_optimizer
from millpond.train.compute.selection import SampleFolders, Selection, batches
from millpond.train.determinism import generators
from millpond.train.job.spec import WorkSpec
from millpond.train.protocol import Update, Work
from millpond.train.state.flat import Vector
from millpond.train.state.flat_parameters import FlatParameters

_CHECKED = 16
"""Exchanges between two checks that the model has not changed its parameters itself."""


class LocalTrainer:
    """Trains the model of ``parameters`` on a worker's samples as ``work`` says, one exchange at a time."""

    def __init__(self, parameters: FlatParameters, samples: SampleFolders, work: WorkSpec) -> None:
        self.parameters, self._samples, self._work = parameters, samples, work
        self._exchanges = 0
        self._process = psutil.Process()
        _forget_peak()

    def run(self, request: Work, state: Vector) -> Update:
        """Train from ``state``; the values of the update are then in ``parameters.sums``. Raises DataError
        for samples that are not there, and any exception of the model.
        """
        started, used = time.perf_counter(), self._used()
        chosen = (
            self._samples.synthetic(request.synthetic) if request.synthetic else self._samples.take(request)
        )
        generators.plant(request.draws or request.seed)
        parameters = self.parameters
        parameters.model.train()
        parameters.load(state)
        if self._work.passes:
            loss = self._train(chosen, request.seed)
            largest, norm = parameters.gather_differences(state, len(chosen))
        else:
            loss = self._differentiate(chosen, state)
            largest, norm = parameters.gather_gradients(len(chosen))
        seconds = time.perf_counter() - started
        busy = math.nan if seconds <= 0 else 1 - (self._used() - used) / seconds / torch.get_num_threads()
        return Update(
            request.exchange,
            len(chosen),
            largest,
            norm,
            seconds,
            min(max(busy, 0.0), 1.0),
            _peak(),
            {"loss": loss},
        )

    def _differentiate(self, chosen: Selection, state: Vector) -> float:
        """Compute the sums of gradients over the samples; returns the summed loss."""
        images, labels = chosen.batch(slice(None))
        self.parameters.clear()
        loss = cross_entropy(self.parameters.model(images), labels, reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        if self._exchanges % _CHECKED == 0:  # a look at the whole model
            self.parameters.check_unchanged(state)
        self._exchanges += 1
        self.parameters.check_bound()
        return loss.item()

    def _train(self, chosen: Selection, seed: int) -> float:
        """Train locally; returns the summed loss of one pass, the mean over all passes. The optimizer is new
        each time: momentum that a worker kept would pull it away from the average.
        """
        model, work = self.parameters.model, self._work
        shuffle = torch.Generator().manual_seed(seed)
        optimizer = make_optimizer(model, work.optimizer)
        total = 0.0
        for _ in range(work.passes):
            for places in batches(chosen.groups, work.batch, work.steps, shuffle):
                images, labels = chosen.batch(places)
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += loss.item() * len(places)
        self.parameters.check_bound()
        return total / work.passes

    def _used(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


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
