# SPDX-License-Identifier: Apache-2.0
"""Pure: shards: the samples of each device, and their assignment to workers in the steps of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millpond.train.balance.curve import Ints
from millpond.train.balance.data_plan import DataPlan, Pool, Position, Share
from millpond.train.balance.ranges import Ranges

AHEAD = 4
"""Exchanges whose samples workers are told before, where samples are streamed."""
_NONE = -1
"""The place of a folder whose shard is left out."""


@dataclass(frozen=True, slots=True)
class Shard:
    """``count`` samples of device ``source``, private or public ones. An answer covers whole groups of
    ``group``.
    """

    source: str
    public: bool
    count: int
    group: int = 1

    @property
    def name(self) -> str:
        """The shard's name in logs and errors."""
        return f"{'public' if self.public else 'private'} samples of {self.source}"

    @property
    def size(self) -> str:
        """The number of samples, and that of a group."""
        return f"{self.count}" if self.group == 1 else f"{self.count} (in groups of {self.group})"


@dataclass(frozen=True, slots=True)
class EpochPosition:
    """The position of an epoch in the data, as checkpoints store it. ``holdings`` are the shards in the order
    of the pools; the checkpoint file holds these field names.
    """

    epoch: int
    holdings: tuple[Shard, ...]
    position: Position


class Shards:
    """Assigns samples to ``workers`` workers. Call ``add`` for what each worker can read, and ``begin`` for
    an epoch.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._shards: list[Shard] = []
        self._folders: dict[int, list[int]] = {}  # by rank: the shard of each folder
        self._outstanding: dict[int, Share] = {}
        self._epoch = 0
        self._position = Position((), ())
        self._plan = DataPlan((), workers)

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self._epoch

    @property
    def epoch_position(self) -> EpochPosition:
        """The position of the epoch if all outstanding tasks were lost."""
        position = self._position
        for share in self._outstanding.values():
            position = self._plan.give_back(position, share)
        return EpochPosition(self._epoch, tuple(self._shards), position)

    def resume(self, position: EpochPosition) -> None:
        """Resume an epoch at a position; no worker can read any shard yet."""
        self._shards = list(position.holdings)
        self._epoch, self._position = position.epoch, position.position
        self._replan()

    def begin(self, epoch: int) -> None:
        """Begin an epoch, of which no sample is assigned."""
        self._epoch, self._position = epoch, Position((), ())
        self._replan()

    def add(self, rank: int, found: Sequence[Shard], *, partly: bool = False) -> str:
        """Add the shards that a worker can read, one for each of its folders: all of them, or ``partly``
        those that are as the job was planned. Returns what is wrong with others, or "".
        """
        known = [next((h for h in self._shards if _same(h, shard)), shard) for shard in found]
        wrong = [
            f"it has {shard.size} {shard.name}; the job was planned with {planned.size}"
            for shard, planned in zip(found, known, strict=True)
            if shard != planned
        ]
        if not wrong or partly:
            self._shards += [shard for shard in known if shard not in self._shards]
            self._folders[rank] = [self._shards.index(s) if s in self._shards else _NONE for s in found]
            self._replan()
        return ", ".join(wrong)

    def deal(self, batches: Sequence[int]) -> list[tuple[Ranges, ...]]:
        """Assign samples for the batches, as SampleSupply.deal."""
        self._position, shares = self._plan.deal(self._position, batches)
        for rank, share in enumerate(shares):
            if share.parts:
                self._outstanding[rank] = share
        return [self._samples(rank, share) for rank, share in enumerate(shares)]

    def coming(self, batches: Sequence[int]) -> list[list[tuple[Ranges, ...]]]:
        """Return what ``deal`` would assign in the next AHEAD exchanges with the same batches."""
        position, found = self._position, []
        for _ in range(AHEAD):
            position, shares = self._plan.deal(position, batches)
            found.append([self._samples(rank, share) for rank, share in enumerate(shares)])
        return found

    def spread(self, batches: Ints, most: int) -> Ints:
        """Return batches by rank that sum to ``most`` at most, as ``DataPlan.spread``."""
        return np.array(self._plan.spread(self._position, batches.tolist(), most), np.int64)

    def commit(self, rank: int) -> None:
        """Mark the worker's samples as used in this epoch."""
        del self._outstanding[rank]

    def requeue(self, rank: int) -> None:
        """Return the worker's samples to the epoch."""
        self._position = self._plan.give_back(self._position, self._outstanding.pop(rank))

    @property
    def samples(self) -> int:
        """The number of samples of an epoch."""
        return sum(shard.count for shard in self._shards)

    def largest_group(self, rank: int) -> int:
        """Return the samples of the largest group that a worker reads, 0 for none."""
        shards = (self._shards[number] for number in self._folders.get(rank, ()) if number != _NONE)
        return max((s.group + s.count % s.group for s in shards if s.group > 1), default=0)

    @property
    def part_left(self) -> float:
        """The part of the epoch's samples that no worker has taken, as SampleSupply.part_left."""
        return sum(self._plan.left(self._position)) / max(1, self.samples)

    @property
    def left(self) -> dict[Shard, int]:
        """The numbers of samples of this epoch that no worker has taken, by shard."""
        left = self._plan.left(self._position)
        return {shard: count for shard, count in zip(self._shards, left, strict=True) if count}

    def _samples(self, rank: int, share: Share) -> tuple[Ranges, ...]:
        taken = {part.pool: part.ranges for part in share.parts}
        return tuple(taken.get(pool, ()) for pool in self._folders.get(rank, ()))

    def _replan(self) -> None:
        """Plan the epoch for the present readers. New shards come last, so the orders of the others stay."""
        readers: list[list[int]] = [[] for _ in self._shards]
        for rank, held in sorted(self._folders.items()):
            for number in held:
                if number != _NONE:
                    readers[number].append(rank)
        pools = [
            Pool(shard.count, tuple(ranks), shard.group)
            for shard, ranks in zip(self._shards, readers, strict=True)
        ]
        self._plan = DataPlan(pools, self._workers)
        new = len(pools) - len(self._position.cursors)
        self._position = Position(self._position.cursors + new * (0,), self._position.again + new * ((),))


class WholeShards(Shards):
    """Assigns to each worker all of its samples in every task: none is left, and tasks may be repeated."""

    def deal(self, batches: Sequence[int]) -> list[tuple[Ranges, ...]]:
        """Assign all samples to the workers that have a batch, as SampleSupply.deal."""
        return [self._whole(rank) if batch else () for rank, batch in enumerate(batches)]

    def commit(self, rank: int) -> None:
        """See Shards: there is nothing to mark."""

    def requeue(self, rank: int) -> None:
        """See Shards: nothing was taken."""

    def _whole(self, rank: int) -> tuple[Ranges, ...]:
        counts = [0 if number == _NONE else self._shards[number].count for number in self._folders[rank]]
        return tuple(((0, count),) if count else () for count in counts)


def _same(one: Shard, other: Shard) -> bool:
    return (one.source, one.public) == (other.source, other.public)
