# SPDX-License-Identifier: Apache-2.0
"""Pure: the samples that each worker takes in each exchange of an epoch, whatever the batches are.

Samples lie in pools: private ones that one worker reads, public ones of a device that it and the host read.
Each is taken exactly once in an epoch. The position in an epoch is a few cursors into permutations that
follow from (seed, epoch), so a checkpoint that holds a ``Position`` resumes in the middle of an epoch. The
host deals positions; each worker computes the permutation itself, and so the samples that lie there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millpond.train.balance.apportion import Apportionment
from millpond.train.balance.curve import Ints
from millpond.train.balance.ranges import Ranges, count, split


@dataclass(frozen=True, slots=True)
class Pool:
    """``count`` samples that the workers of the ranks ``readers`` can read. A share has none of them, or at
    least ``least``; only of a pool with one reader this may be more than 1.
    """

    count: int
    readers: tuple[int, ...]
    least: int = 1


@dataclass(frozen=True, slots=True)
class PoolShare:
    """Positions of one pool, at least one."""

    pool: int
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Share:
    """A worker's samples of one exchange: at most one part of each pool."""

    parts: tuple[PoolShare, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of samples in the share."""
        return sum(count(part.ranges) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Position:
    """The progress of an epoch, by pool: cursors into the orders, and positions dealt but given back."""

    cursors: tuple[int, ...]
    again: tuple[Ranges, ...]


class DataPlan:
    """Deals the positions of ``pools`` to ``workers`` workers."""

    def __init__(self, pools: Sequence[Pool], workers: int) -> None:
        self._counts = [pool.count for pool in pools]
        self._least = [pool.least for pool in pools]
        self._apportion = Apportionment([pool.readers for pool in pools], workers)

    def begin(self) -> Position:
        """Return the position at which nothing is dealt."""
        return Position(len(self._counts) * (0,), len(self._counts) * ((),))

    def left(self, position: Position) -> tuple[int, ...]:
        """Return the samples still to be dealt, by pool."""
        found = zip(self._counts, position.cursors, position.again, strict=True)
        return tuple(whole - cursor + count(again) for whole, cursor, again in found)

    def deal(self, position: Position, batches: Sequence[int]) -> tuple[Position, list[Share]]:
        """Return the position after a step with these batches, and its shares by rank. A worker that is
        absent or sits out has a batch of 0. A share is smaller than its batch where the worker's pools are
        empty, and may be one more so that no sample is left alone, see ``apportion``; it is larger where a
        pool's ``least`` asks for that. All shares are empty
        when no worker with a batch can read any remaining sample.
        """
        cursors, again = list(position.cursors), list(position.again)
        shares, left = [], self.left(position)
        for counts in self._apportion.counts(left, batches):
            parts = []
            for pool, found in sorted(counts.items()):
                wanted = _enough(found, left[pool], self._least[pool])
                returned, again[pool] = split(again[pool], wanted)
                start = cursors[pool]
                cursors[pool] += wanted - count(returned)
                fresh = ((start, cursors[pool]),) if cursors[pool] > start else ()
                parts.append(PoolShare(pool, returned + fresh))
            shares.append(Share(tuple(parts)))
        return Position(tuple(cursors), tuple(again)), shares

    def spread(self, position: Position, batches: Sequence[int], most: int) -> list[int]:
        """Return batches no larger than these, of ``most`` samples together, that spread the remaining
        samples evenly over the remaining steps, see ``apportion``.
        """
        return self._apportion.spread(self.left(position), batches, most)

    def give_back(self, position: Position, share: Share) -> Position:
        """Put the samples of a share that did not become part of a step back into their pools, where they are
        dealt next. Return the new position.
        """
        again = list(position.again)
        for part in share.parts:
            again[part.pool] = part.ranges + again[part.pool]
        return Position(position.cursors, tuple(again))


def _enough(wanted: int, left: int, least: int) -> int:
    """Return at least ``least`` instead of ``wanted``, and all that is left if less would remain."""
    found = max(wanted, min(least, left))
    return left if left - found < least else found


def order(samples: int, seed: int, epoch: int, source: str, public: bool) -> Ints:
    """Return the order of one pool's ``samples`` samples in an epoch: a permutation that follows from the
    arguments, the same on every processor. ``source`` names the device of the pool.
    """
    text = f"{seed} {epoch} {'public' if public else 'private'} {source}"
    key = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).permutation(samples)
