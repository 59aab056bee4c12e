"""Edge (torch.distributed): steps of many workers that are exactly those of one with all their samples.

The mean of means that DistributedDataParallel makes is wrong for batches of different sizes. Here each worker
gives the *sum* of its gradients and its number of samples in one all_reduce, and divides once, by the number
of all. The same vector carries each worker's seconds, so all see the same numbers and plan alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

_EXACT = 1 << 24
"""A float32 counts so far."""


@dataclass(frozen=True, slots=True)
class Step:
    """What all workers know after a step: samples in it, and by rank the batches and the seconds of each
    one's own work, 0 for who had none.
    """

    samples: int
    batches: tuple[int, ...]
    seconds: tuple[float, ...]


class Lockstep:
    """The exchange for ``model``, whose parameters must be the same everywhere: ``broadcast`` sees to that.
    It uses the default process group and a CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._rank, self._workers = dist.get_rank(), dist.get_world_size()
        sizes = [parameter.numel() for parameter in self._parameters]
        self._vector = torch.zeros(sum(sizes) + 2 * self._workers)
        self._gradients = torch.split(self._vector[: sum(sizes)], sizes)
        self._batches, self._seconds = torch.split(self._vector[sum(sizes) :], self._workers)

    def broadcast(self) -> None:
        """Give everyone the state of rank 0's model, buffers included."""
        for tensor in self._model.state_dict().values():
            dist.broadcast(tensor, src=0)

    def exchange(self, samples: int, seconds: float) -> Step:
        """After ``backward`` of a loss that is a sum over ``samples``: the gradients become those of the mean
        over everyone's. With 0 samples a worker only takes part. Raises ValueError for too many samples, or
        if nobody had any.
        """
        if not 0 <= samples < _EXACT // self._workers:
            raise ValueError(f"{samples} samples in a batch")
        self._pack(samples, seconds)
        dist.all_reduce(self._vector)
        total = int(self._batches.sum())
        if total == 0:
            raise ValueError("nobody had a sample in this step")
        self._unpack(total)
        batches = tuple(int(batch) for batch in self._batches.tolist())
        return Step(total, batches, tuple(self._seconds.tolist()))

    def _pack(self, samples: int, seconds: float) -> None:
        for part, parameter in zip(self._gradients, self._parameters, strict=True):
            if samples and parameter.grad is not None:
                part.copy_(parameter.grad.reshape(-1))
            else:
                part.zero_()
        for slots, value in ((self._batches, float(samples)), (self._seconds, seconds)):
            slots.zero_()
            slots[self._rank] = value

    @torch.no_grad()
    def _unpack(self, total: int) -> None:
        for part, parameter in zip(self._gradients, self._parameters, strict=True):
            gradient: Tensor = part.view_as(parameter) / total
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
