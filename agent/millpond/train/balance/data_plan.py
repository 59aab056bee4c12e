# SPDX-License-Identifier: Apache-2.0
"""Pure: the samples that each worker takes in each exchange of an epoch, whatever the batches are.

Samples lie in pools: private ones that one worker reads, public ones of a device that it and the host read.
Each is taken exactly once in an epoch. The samples of a pool may be in groups, the same in all epochs and
jobs: an update covers whole groups, so no difference of updates tells of less than a group. The position in
an epoch is a few cursors into permutations that follow from (seed, epoch), so a checkpoint that holds a
``Position`` resumes in the middle of an epoch. The host deals positions; each worker computes the permutation
itself, and so the samples that lie there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millpond.train.balance.apportion import Apportionment
from millpond.train.balance.curve import Ints
from millpond.train.balance.ranges import Ranges, count, split

_FEW = 2
"""Samples of which BatchNorm needs at least so many."""


@dataclass(frozen=True, slots=True)
class Pool:
    """``count`` samples that the workers of the ranks ``readers`` can read, in groups of ``group``; only a
    pool with one reader may have groups of more than 1.
    """

    count: int
    readers: tuple[int, ...]
    group: int = 1


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
        self._groups = [pool.group for pool in pools]
        self._apportion = Apportionment([pool.readers for pool in pools], workers)
        mixed = {rank for pool in pools if pool.group == 1 for rank in pool.readers}
        self._grouped = {rank: pool.group for pool in pools for rank in pool.readers if rank not in mixed}

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
        empty, and may be one more so that no sample is left alone, see ``apportion``; it is smaller, too,
        where it has no samples but those of a pool in groups, and larger where one group is. All shares are
        empty when no worker with a batch can read any remaining sample.
        """
        cursors, again = list(position.cursors), list(position.again)
        shares, left = [], self.left(position)
        for counts in self._in_groups(self._apportion.counts(left, batches), left):
            parts = []
            for pool, wanted in sorted(counts.items()):
                returned, again[pool] = split(again[pool], wanted)
                start = cursors[pool]
                cursors[pool] += wanted - count(returned)
                fresh = ((start, cursors[pool]),) if cursors[pool] > start else ()
                parts.append(PoolShare(pool, returned + fresh))
            shares.append(Share(tuple(parts)))
        return Position(tuple(cursors), tuple(again)), shares

    def spread(self, position: Position, batches: Sequence[int], most: int) -> list[int]:
        """Return batches no larger than these, of ``most`` samples together, that spread the remaining
        samples evenly over the remaining steps, see ``apportion``. A batch of samples in groups alone is of
        whole groups.
        """
        found, owed = self._apportion.spread(self.left(position), batches, most), 0
        for rank, group in self._grouped.items():
            if found[rank]:
                wanted = min(found[rank] + owed, batches[rank])
                whole = max(group, round(wanted / group) * group)
                if whole > batches[rank]:
                    whole = max(group, whole - group)
                owed += found[rank] - whole
                found[rank] = whole
        return found

    def _in_groups(self, counts: list[dict[int, int]], left: Sequence[int]) -> list[dict[int, int]]:
        """Change counts, by rank and pool, to whole groups. The other pools of a share make up for the
        difference, as far as they can.
        """
        free = [rest - sum(own.get(pool, 0) for own in counts) for pool, rest in enumerate(left)]
        for own in counts:
            others = [pool for pool in own if self._groups[pool] == 1]
            for pool in [pool for pool in own if self._groups[pool] > 1]:
                found, group = own[pool], self._groups[pool]
                nearest = round(found / group) * group
                spare = sum(own[other] if nearest > found else free[other] - _FEW for other in others)
                wanted = nearest if abs(nearest - found) <= spare else found
                own[pool] = _whole(wanted, left[pool], group) if wanted else 0
                for other in others:
                    change = _change(found - own[pool], own[other], free[other])
                    own[other] += change
                    free[other] -= change
                    found -= change
        return [{pool: found for pool, found in own.items() if found} for own in counts]

    def give_back(self, position: Position, share: Share) -> Position:
        """Put the samples of a share that did not become part of a step back into their pools, where they are
        dealt next. Return the new position.
        """
        again = list(position.again)
        for part in share.parts:  # in order: a last group is longer than the others
            again[part.pool] = tuple(sorted(part.ranges + again[part.pool]))
        return Position(position.cursors, tuple(again))


def _whole(wanted: int, left: int, group: int) -> int:
    """Return the largest number of samples up to ``wanted``, of ``left``, that takes and leaves whole groups,
    but at least one group. The last one has the rest, too.
    """
    last = group + left % group
    if wanted >= left or left <= last:
        return left
    return min(max(group, wanted // group * group), left - last)


def _change(wanted: int, taken: int, free: int) -> int:
    """Return by how much a share of a pool can grow, or shrink, and not leave one sample alone."""
    change = max(-taken, min(wanted, free))
    if change and free - change == 1:
        change -= 1 if change > 0 else -1
    return change


def order(
    samples: int, seed: int, epoch: int, source: str, public: bool, group: int = 1, held: int = 0
) -> Ints:
    """Return the order of one pool's ``samples`` samples in an epoch: a permutation that follows from the
    arguments, the same on every processor. ``source`` names the device of the pool. The samples of a group of
    ``group`` follow each other. Where their number is not a multiple of it, the last group has the rest too,
    and is the last in each epoch. Those that ``held_out`` returns for ``held`` are left out.
    """
    text = f"{seed} {epoch} {'public' if public else 'private'} {source}"
    if group == 1 and not held:
        return _permutation(text, samples)
    members = _permutation(f"groups {source}", samples)[held:]
    last = len(members) // group - bool(len(members) % group)
    groups = members[: last * group].reshape(last, group)[_permutation(text, last)]
    return np.concatenate([groups.reshape(-1), members[last * group :]])


def held_out(samples: int, source: str, held: int) -> Ints:
    """Return ``held`` of a pool's samples: whole groups, the same in all epochs and jobs."""
    return _permutation(f"groups {source}", samples)[:held]


def held_count(samples: int, share: float, group: int) -> int:
    """Return how many samples are held out: about a ``share`` of them, in whole groups, at least one group
    where as much is left, else none.
    """
    if not share or samples < 2 * group:
        return 0
    return min(max(1, round(share * samples / group)), samples // group - 1) * group


def _permutation(text: str, count: int) -> Ints:
    key = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).permutation(count)
