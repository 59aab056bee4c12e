# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, psutil): the gradients of a synchronous step, and the server optimizer that applies them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from millpond.base.errors import LocalError
from millpond.train.data.errors import DataError
from millpond.train.data.samples import Samples
from millpond.train.determinism import generators
from millpond.train.protocol import Compute, Computed
from millpond.train.state import layout
from millpond.train.state.flat import Vector
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.state.layout import Tensor as Entry


class GradientWorker:
    """Computes sums of gradients for the model of ``parameters`` over samples, ``parts`` by folder."""

    def __init__(self, parameters: FlatParameters, parts: Sequence[Samples]) -> None:
        self.parameters = parameters
        self._model, self._parts = parameters.model, parts
        self._process = psutil.Process()
        _forget_peak()

    def compute(self, request: Compute) -> Computed:
        """Compute gradients at ``parameters.state``; their sums are then in ``parameters.sums``. Raises
        DataError for samples that are not there, and any exception of the model.
        """
        started, used = time.perf_counter(), self._used()
        images, labels = self._take(request.samples)
        generators.plant(request.seed)
        self._model.train()
        self.parameters.loaded()
        self.parameters.clear()
        loss = cross_entropy(self._model(images), labels, reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        self.parameters.check_bound()
        self.parameters.gather(len(labels))
        seconds = time.perf_counter() - started
        busy = math.nan if seconds <= 0 else 1 - (self._used() - used) / seconds / torch.get_num_threads()
        busy = min(max(busy, 0.0), 1.0)
        return Computed(request.step, len(labels), loss.item(), seconds, busy, _peak())

    def _used(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def _take(self, wanted: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return images and labels of the samples with these indices by folder. Raises DataError."""
        if len(wanted) != len(self._parts):
            raise DataError(f"samples of {len(wanted)} folders are wanted; there are {len(self._parts)}")
        images, labels = [], []
        for indices, part in zip(wanted, self._parts, strict=True):
            if not indices:
                continue
            if min(indices) < 0 or max(indices) >= len(part):
                raise DataError(f"sample {max(indices)} is wanted; there are {len(part)}")
            at = np.asarray(indices)
            images.append(part.images[at])
            labels.append(part.labels[at])
        if not labels:
            raise DataError("a step without samples is wanted")
        return torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels))


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


class ServerOptimizer:
    """Applies mean gradients to the model of ``parameters`` with a torch optimizer, as one process with all
    samples would.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        optimizer: torch.optim.Optimizer,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self.parameters = parameters
        self._optimizer, self._after_step = optimizer, after_step

    def apply(self, factor: float) -> None:
        """Make one step with the mean in ``parameters.sums``, at ``factor`` times the optimizer's own
        learning rates. The new state is then in ``parameters.state``.
        """
        self.parameters.take_mean()
        own = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        self._optimizer.step()
        for group, rate in zip(self._optimizer.param_groups, own, strict=True):
            group["lr"] = rate
        if self._after_step:
            self._after_step()
        self.parameters.complete()

    def momentum(self) -> tuple[tuple[Entry, ...], Vector]:
        """Return the optimizer's tensors, named ``parameter.name``, and their values as float32 [size]."""
        entries, values = [], []
        for number, state in sorted(self._optimizer.state_dict()["state"].items()):
            for name, value in sorted(state.items()):
                if isinstance(value, Tensor):
                    entries.append(Entry(f"{number}.{name}", tuple(value.shape), "float32"))
                    values.append(value.detach().reshape(-1).to(torch.float32).numpy())
        return tuple(entries), np.concatenate(values) if values else np.empty(0, np.float32)

    def restore(self, entries: tuple[Entry, ...], values: Vector) -> None:
        """Take an optimizer's tensors back. Raises LocalError for those of another optimizer."""
        self.parameters.loaded()
        whole = self._optimizer.state_dict()
        state: dict[int, dict[str, Tensor]] = {}
        for entry, span in layout.spans(entries):
            number, _, name = entry.name.partition(".")
            if not number.isdigit():
                raise LocalError(f"the checkpoint's '{entry.name}' is not of an optimizer")
            state.setdefault(int(number), {})[name] = torch.from_numpy(values[span].copy()).view(entry.shape)
        whole["state"] = state
        self._optimizer.load_state_dict(whole)
