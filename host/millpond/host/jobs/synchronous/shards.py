"""Pure: whose samples are where, and which of them each worker takes in the steps of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from millpond.train.balance.curve import Ints
from millpond.train.balance.data_plan import DataPlan, Pool, Position, Share

if TYPE_CHECKING:
    from millpond.host.workers.dispatcher import Samples


@dataclass(frozen=True, slots=True)
class Shard:
    """``count`` samples of device ``source``, private ones or public ones."""

    source: str
    public: bool
    count: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{'public' if self.public else 'private'} samples of {self.source}"


@dataclass(frozen=True, slots=True)
class EpochPosition:
    """Where an epoch stands; what a checkpoint keeps. The holdings are in the order of the pools."""

    epoch: int
    holdings: tuple[Shard, ...]
    position: Position


class Shards:
    """Deals the samples of ``workers`` workers. ``add`` what each can read, then ``begin`` an epoch."""

    def __init__(self, seed: int, workers: int) -> None:
        self._seed, self._workers = seed, workers
        self._holdings: list[Shard] = []
        self._folders: dict[int, list[int]] = {}  # by rank: the holding of each folder
        self._out: dict[int, Share] = {}
        self._epoch = 0
        self._position = Position((), ())
        self._plan = DataPlan(seed, 0, (), workers)

    @property
    def place(self) -> EpochPosition:
        """Where the epoch would stand if all who are at work were lost."""
        position = self._position
        for share in self._out.values():
            position = self._plan.give_back(position, share)
        return EpochPosition(self._epoch, tuple(self._holdings), position)

    def resume(self, place: EpochPosition) -> None:
        """Go on where an epoch stood; nobody is there to read anything yet."""
        self._holdings = list(place.holdings)
        self._epoch, self._position = place.epoch, place.position
        self._lay_out()

    def begin(self, epoch: int) -> None:
        """Nothing of this epoch is dealt."""
        self._epoch, self._position = epoch, Position((), ())
        self._lay_out()

    def add(self, rank: int, found: Sequence[Shard]) -> str:
        """A worker can read these, in its folders, from now on. Why it may not, or nothing."""
        for holding in found:
            known = next((h for h in self._holdings if _same(h, holding)), None)
            if known is not None and known.count != holding.count:
                return f"it has {holding.count} {holding.name}; the job was planned with {known.count}"
        self._holdings += [holding for holding in found if not any(_same(h, holding) for h in self._holdings)]
        self._folders[rank] = [self._holdings.index(holding) for holding in found]
        self._lay_out()
        return ""

    def deal(self, batches: Sequence[int]) -> list[Samples]:
        """See stepping.Supply."""
        self._position, shares = self._plan.deal(self._position, batches)
        for rank, share in enumerate(shares):
            if share.parts:
                self._out[rank] = share
        return [self._samples(rank, share) for rank, share in enumerate(shares)]

    def spread(self, batches: Ints, most: int) -> Ints:
        """See ``DataPlan.spread``, by rank."""
        return np.array(self._plan.spread(self._position, batches.tolist(), most), np.int64)

    def counted(self, rank: int) -> None:
        """What the worker had was counted."""
        del self._out[rank]

    def give_back(self, rank: int) -> None:
        """What the worker had was not."""
        self._position = self._plan.give_back(self._position, self._out.pop(rank))

    @property
    def samples(self) -> int:
        """Of an epoch."""
        return sum(holding.count for holding in self._holdings)

    @property
    def left(self) -> dict[Shard, int]:
        """Samples of this epoch that nobody has taken."""
        left = self._plan.left(self._position)
        return {holding: count for holding, count in zip(self._holdings, left, strict=True) if count}

    def _samples(self, rank: int, share: Share) -> Samples:
        taken = {part.pool: part.indices for part in share.parts}
        return tuple(taken.get(pool, ()) for pool in self._folders.get(rank, ()))

    def _lay_out(self) -> None:
        """The plan of who can read what now. New holdings come last, so the orders of others stay."""
        pools = [
            Pool(holding.count, tuple(sorted(r for r, held in self._folders.items() if number in held)))
            for number, holding in enumerate(self._holdings)
        ]
        self._plan = DataPlan(self._seed, self._epoch, pools, self._workers)
        new = len(pools) - len(self._position.cursors)
        self._position = Position(self._position.cursors + new * (0,), self._position.again + new * ((),))


def _same(one: Shard, other: Shard) -> bool:
    return (one.source, one.public) == (other.source, other.public)
