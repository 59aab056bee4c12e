# SPDX-License-Identifier: Apache-2.0
"""Edge (torch.distributed): the exact all-reduce of gradients over ranks with batches of different sizes.

The mean of means that DistributedDataParallel makes is wrong for batches of different sizes. Here each rank
gives *sums* to one all_reduce, and divides once, by the samples of all: a step is exactly that of one process
with all samples. The same vector carries the batches and the seconds of all, so every rank sees the same
numbers and plans alike:

    [gradients, changes of running statistics times samples | batches by rank | seconds by rank]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from millpond.base.errors import LocalError

_EXACT = 1 << 24
"""The largest count that a float32 holds exactly."""


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """The numbers of a step that all ranks know after it: by rank the samples, 0 for none, and the seconds of
    the rank's own work for them.
    """

    batches: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def samples(self) -> int:
        """Return the samples of all ranks."""
        return sum(self.batches)


class AllReduce:
    """Exchanges gradients between the ranks of the default process group; without one, for a single process.
    At first all ranks get the ``model`` of rank 0. Raises LocalError for a model without parameters, for
    parameters that are not float32 on a CPU, and if the ranks have different models.
    """

    def __init__(self, model: nn.Module) -> None:
        together = dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        self._model = model
        self._parameters = _trained(model)
        sizes = [tensor.numel() for tensor in (*self._parameters, *self._statistics())]
        if len(set(self.gather(sum(sizes)))) > 1:
            raise LocalError("the ranks have models of different sizes")
        self._vector = torch.zeros(sum(sizes) + 2 * self.ranks)
        self._sums = self._vector[: sum(sizes)]
        self._parts = torch.split(self._sums, sizes)
        self._batches, self._seconds = torch.split(self._vector[sum(sizes) :], self.ranks)
        self._broadcast()
        self._before = [tensor.clone() for tensor in self._statistics()]

    def gather(self, value: int) -> tuple[int, ...]:
        """Return every rank's ``value``, by rank."""
        slots = torch.zeros(self.ranks, dtype=torch.int64)
        slots[self.rank] = value
        if self.ranks > 1:
            dist.all_reduce(slots)
        return tuple(slots.tolist())

    @torch.no_grad()
    def step(self, samples: int, seconds: float) -> ExchangeStep:
        """Exchange after ``backward`` of a loss that is a sum over ``samples``: the gradients become those of
        the mean over all ranks' samples, at least one. A rank with 0 samples only takes part; its gradients
        do not count.
        """
        self._pack(samples, seconds)
        if self.ranks > 1:
            dist.all_reduce(self._vector)
        batches = tuple(int(batch) for batch in self._batches.tolist())
        self._sums /= sum(batches)
        self._unpack()
        return ExchangeStep(batches, tuple(self._seconds.tolist()))

    def _pack(self, samples: int, seconds: float) -> None:
        if samples * self.ranks >= _EXACT:
            raise LocalError(f"a batch of {samples} samples is too large to be counted")
        self._vector.zero_()
        if samples:
            for part, parameter in zip(self._parts, self._parameters, strict=False):
                if parameter.grad is not None:
                    part.copy_(parameter.grad.reshape(-1))
            for part, tensor, before in self._changes():
                part.copy_((tensor - before).reshape(-1)).mul_(samples)
        self._batches[self.rank], self._seconds[self.rank] = samples, seconds

    def _unpack(self) -> None:
        for part, parameter in zip(self._parts, self._parameters, strict=False):
            if parameter.grad is None:
                parameter.grad = part.view_as(parameter).clone()
            else:
                parameter.grad.copy_(part.view_as(parameter))
        for part, tensor, before in self._changes():
            before += part.view_as(before)
            tensor.copy_(before)

    def _changes(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield of each running statistic its part of the vector, its present tensor, and its last value."""
        return zip(self._parts[len(self._parameters) :], self._statistics(), self._before, strict=True)

    def _statistics(self) -> list[Tensor]:
        return [tensor for tensor in self._model.buffers() if tensor.is_floating_point()]

    @torch.no_grad()
    def _broadcast(self) -> None:
        for tensor in (*self._model.parameters(), *self._model.buffers()) if self.ranks > 1 else ():
            given = tensor.reshape(-1).clone()
            dist.broadcast(given.view(torch.uint8), src=0)  # gloo does not know all types
            tensor.copy_(given.view_as(tensor))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    found = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not found:
        raise LocalError("the model has no parameters to train")
    for name, parameter in found:
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise LocalError(
                f"the model's parameter '{name}' is {dtype} on {parameter.device}, not float32 on a CPU; "
                "call .float().cpu() on the model"
            )
    return [parameter for _, parameter in found]
