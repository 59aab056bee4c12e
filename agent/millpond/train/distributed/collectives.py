# SPDX-License-Identifier: Apache-2.0
"""Edge (torch.distributed): the few collectives that a group's exchanges stand on, and two of their carriers.

``Alone`` is for a process by itself, ``TorchCollectives`` for the ranks of torch's default process group, and
``channel.ChannelCollectives`` for a confined script, whose agent carries them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from millpond.base.errors import LocalError

SLOTS = 3
"""Values of each rank behind the vector of a step."""
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


class Collectives(Protocol):
    """Operations of all ranks together, each in the same order."""

    rank: int
    ranks: int
    least: tuple[int, ...]
    """By rank the least samples of an exchange, as its device's policy has it."""
    source: str
    """The name of this worker, by which its private samples are in groups."""

    def gather(self, value: int) -> tuple[int, ...]:
        """Return every rank's ``value``, by rank."""

    def share(self, state: Sequence[Tensor]) -> None:
        """Overwrite the tensors by those of rank 0."""

    def mean(self, vector: Tensor, samples: int, count: int, seconds: float) -> ExchangeStep:
        """Replace sums over this rank's ``samples``, which count ``count``, by the mean over all ranks'
        counts. ``vector`` is float32, with space for SLOTS values of each rank at its end, and zeros for 0
        samples.
        """

    def add(self, name: str, /, total: float, samples: int) -> tuple[float, int]:
        """Return the sums of a metric's total, and of its samples, over all ranks."""


class Alone:
    """The collectives of a single process."""

    def __init__(self) -> None:
        self.rank, self.ranks = 0, 1
        self.least: tuple[int, ...] = (1,)
        self.source = ""

    def gather(self, value: int) -> tuple[int, ...]:
        """Return the value."""
        return (value,)

    def share(self, state: Sequence[Tensor]) -> None:
        """Leave the state as it is."""

    def mean(self, vector: Tensor, samples: int, count: int, seconds: float) -> ExchangeStep:
        """Divide the sums."""
        vector /= count or 1
        return ExchangeStep((samples,), (seconds,))

    def add(self, _name: str, /, total: float, samples: int) -> tuple[float, int]:
        """Return both as they are."""
        return total, samples


class TorchCollectives:
    """The collectives of the ranks of torch's default process group. The vector of a step carries the batches
    the counts and the seconds of all ranks, too: [sums | batches | counts | seconds], each by rank.
    """

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.least: tuple[int, ...] = self.ranks * (1,)
        self.source = ""

    def gather(self, value: int) -> tuple[int, ...]:
        """Return every rank's ``value``, by rank."""
        slots = torch.zeros(self.ranks, dtype=torch.int64)
        slots[self.rank] = value
        dist.all_reduce(slots)
        return tuple(slots.tolist())

    def share(self, state: Sequence[Tensor]) -> None:
        """Overwrite the tensors by those of rank 0."""
        for tensor in state:
            given = tensor.reshape(-1).clone()
            dist.broadcast(given.view(torch.uint8), src=0)  # gloo does not know all types
            tensor.copy_(given.view_as(tensor))

    def mean(self, vector: Tensor, samples: int, count: int, seconds: float) -> ExchangeStep:
        """Replace sums by the mean over all ranks' counts. Raises LocalError for too large a batch."""
        if max(samples, count) * self.ranks >= _EXACT:
            raise LocalError(f"a batch of {samples} samples, which count {count}, is too large to be counted")
        size = len(vector) - SLOTS * self.ranks
        batches, counts, times = torch.split(vector[size:], self.ranks)
        batches[self.rank], counts[self.rank], times[self.rank] = samples, count, seconds
        dist.all_reduce(vector)
        vector[:size] /= sum(counts.tolist()) or 1.0
        return ExchangeStep(tuple(map(int, batches.tolist())), tuple(times.tolist()))

    def add(self, _name: str, /, total: float, samples: int) -> tuple[float, int]:
        """Return the sums of a metric's total, and of its samples, over all ranks."""
        sums = torch.tensor([total, samples], dtype=torch.float64)
        dist.all_reduce(sums)
        found, count = sums.tolist()
        return found, int(count)
