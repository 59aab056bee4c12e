# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, psutil): a worker's part of an exchange: gradients, or the difference of local training."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from millpond.train.balance.data_plan import order
from millpond.train.compute.optimizers import make_optimizer
from millpond.train.data.errors import DataError
from millpond.train.data.samples import Samples
from millpond.train.determinism import generators
from millpond.train.job.spec import WorkSpec
from millpond.train.protocol import Folder, Update, Work
from millpond.train.state.flat import Vector
from millpond.train.state.flat_parameters import FlatParameters

_CHECKED = 16
"""Exchanges between two checks that the model has not changed its parameters itself."""


class SampleFolders:
    """The samples of a worker, by folder, in the order of an epoch."""

    def __init__(self, seed: int, folders: Sequence[Folder], parts: Sequence[Samples]) -> None:
        self._seed, self._folders, self.parts = seed, folders, parts
        self._epoch: int | None = None

    def take(self, request: Work) -> Selection:
        """Return the samples of a request. Raises DataError for positions that do not exist."""
        if len(request.ranges) != len(self.parts):
            raise DataError(
                f"samples of {len(request.ranges)} folders are wanted; there are {len(self.parts)}"
            )
        if request.epoch != self._epoch:
            self._orders = [
                order(len(part), self._seed, request.epoch, folder.source, folder.public, folder.group)
                for folder, part in zip(self._folders, self.parts, strict=True)
            ]
            self._epoch = request.epoch
        found = []
        for ranges, own in zip(request.ranges, self._orders, strict=True):
            for start, stop in ranges:
                if not 0 <= start < stop <= len(own):
                    raise DataError(f"samples {start} to {stop} are wanted; there are {len(own)}")
            found.append(np.concatenate([own[:0], *(own[start:stop] for start, stop in ranges)]))
        return Selection(self.parts, found)

    def synthetic(self, count: int) -> Selection:
        """Return ``count`` samples of noise with the shape of the real ones. Raises DataError if there are
        none.
        """
        like = next((part for part in self.parts if len(part)), None)
        if like is None:
            raise DataError("missing data: there are no samples")
        images = np.random.default_rng(0).random((count, *like.images.shape[1:]), np.float32)
        return Selection([Samples(images, np.zeros(count, np.int64))], [np.arange(count)])


class Selection:
    """Samples of an exchange: ``indices`` into ``parts``."""

    def __init__(self, parts: Sequence[Samples], indices: Sequence[np.ndarray]) -> None:
        used = [(part, own) for part, own in zip(parts, indices, strict=True) if len(own)]
        if not used:
            raise DataError("an exchange without samples is wanted")
        self._parts = [part for part, _ in used]
        self._indices = [own for _, own in used]
        self._ends = np.cumsum([len(own) for own in self._indices])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, places: np.ndarray | slice) -> tuple[Tensor, Tensor]:
        """Return images and labels of some of the samples."""
        wanted = np.arange(len(self))[places]
        which = np.searchsorted(self._ends, wanted, side="right")
        images, labels = [], []
        for number in np.unique(which):
            part, own = self._parts[number], self._indices[number]
            at = own[wanted[which == number] - (self._ends[number] - len(own))]
            images.append(part.images[at])
            labels.append(part.labels[at])
        whole = len(images) == 1
        return (
            torch.from_numpy(images[0] if whole else np.concatenate(images)),
            torch.from_numpy(labels[0] if whole else np.concatenate(labels)),
        )


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
        generators.plant(request.seed)
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
            for places in self._batches(len(chosen), shuffle):
                images, labels = chosen.batch(places.numpy())
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += loss.item() * len(places)
        self.parameters.check_bound()
        return total / work.passes

    def _batches(self, count: int, shuffle: torch.Generator) -> Iterator[Tensor]:
        if self._work.batch:
            return batches(count, self._work.batch, shuffle)
        return equal_batches(count, self._work.steps, shuffle)

    def _used(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


def batches(count: int, batch: int, shuffle: torch.Generator) -> Iterator[Tensor]:
    """Yield indices of all samples, shuffled; a last one alone joins the batch before, for BatchNorm."""
    order = torch.randperm(count, generator=shuffle)
    parts = [order[start : start + batch] for start in range(0, count, batch)]
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    yield from parts


def equal_batches(count: int, steps: int, shuffle: torch.Generator) -> Iterator[Tensor]:
    """Yield indices of all samples, shuffled, in ``steps`` batches; in fewer, so that none is alone."""
    order = torch.randperm(count, generator=shuffle)
    yield from order.tensor_split(max(1, min(steps, count // 2)))


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
