# SPDX-License-Identifier: Apache-2.0
"""Pure: the samples that each worker takes in each step of an epoch, whatever the batches are.

Samples lie in pools: private ones that one worker reads, public ones of a device that it and the host read.
Each is taken exactly once in an epoch. The position in an epoch is a few cursors into permutations that
follow from (seed, epoch), so a checkpoint that holds a ``Position`` resumes in the middle of an epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millpond.train.balance.apportion import Apportionment
from millpond.train.balance.curve import Ints


@dataclass(frozen=True, slots=True)
class Pool:
    """``count`` samples that the workers of the ranks ``readers`` can read."""

    count: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Indices of one pool, at least one."""

    pool: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """A worker's samples of one step: at most one part of each pool."""

    parts: tuple[Part, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of samples in the share."""
        return sum(len(part.indices) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Position:
    """The progress of an epoch, by pool: cursors into the orders, and samples dealt but given back."""

    cursors: tuple[int, ...]
    again: tuple[tuple[int, ...], ...]


class DataPlan:
    """Deals the samples of ``pools`` to ``workers`` workers, in an order that ``seed`` and ``epoch`` fix."""

    def __init__(self, seed: int, epoch: int, pools: Sequence[Pool], workers: int) -> None:
        self._orders = [_order(pool.count, seed, epoch, number) for number, pool in enumerate(pools)]
        self._apportion = Apportionment([pool.readers for pool in pools], workers)

    def begin(self) -> Position:
        """Return the position at which nothing is dealt."""
        return Position(len(self._orders) * (0,), len(self._orders) * ((),))

    def left(self, position: Position) -> tuple[int, ...]:
        """Return the samples still to be dealt, by pool."""
        found = zip(self._orders, position.cursors, position.again, strict=True)
        return tuple(len(order) - cursor + len(again) for order, cursor, again in found)

    def deal(self, position: Position, batches: Sequence[int]) -> tuple[Position, list[Share]]:
        """Return the position after a step with these batches, and its shares by rank. A worker that is
        absent or sits out has a batch of 0. A share is smaller than its batch where the worker's pools are
        empty, and may be one more so that no sample is left alone, see ``apportion``. All shares are empty
        when no worker with a batch can read any remaining sample.
        """
        cursors, again = list(position.cursors), list(position.again)
        shares = []
        for counts in self._apportion.counts(self.left(position), batches):
            parts = []
            for pool, count in sorted(counts.items()):
                returned = again[pool][:count]
                end = cursors[pool] + count - len(returned)
                fresh = tuple(self._orders[pool][cursors[pool] : end].tolist())
                again[pool], cursors[pool] = again[pool][len(returned) :], end
                parts.append(Part(pool, returned + fresh))
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
            again[part.pool] = part.indices + again[part.pool]
        return Position(position.cursors, tuple(again))


def _order(count: int, seed: int, epoch: int, pool: int) -> Ints:
    """Return a permutation that follows from the arguments, the same on every processor."""
    key = hashlib.blake2b(f"{seed} {epoch} {pool}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).permutation(count)
