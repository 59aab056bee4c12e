# SPDX-License-Identifier: Apache-2.0
"""Pure: how many samples of which pool each worker takes in a step, so that all pools end together.

The remaining samples are laid out over the fewest steps in which the present workers can take them: pools
with few readers first, and in a pool first the readers with the fewest other pools. So a device is given as
many of its own samples as it can take in these steps, and the host the rest of the pools whose device cannot
finish them. In each step every worker takes from its pools in these proportions; a worker whose part is done
helps with any pool that it can read.

One sample alone has no variance, which BatchNorm needs. So no step leaves a single sample in a pool: a worker
takes it too, one more than its batch, or leaves two. And a worker that would get a single sample takes
another one, left in a pool or from a share of three or more, or gives its own to a smaller share. A pool that
had two samples or more can always be dealt so to batches of two or more; a share of one is all that was left
of a pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

Amounts = list[tuple[int, float]]
"""Samples by pool: (pool, samples of it)."""

_HALVINGS = 12
"""Bisections of the number of remaining steps, which is then known to 1/4096 of it."""
_LEAST = 2
_ENOUGH = 0.5
"""A plan that leaves less than half a sample leaves none: the rest is rounding."""


class Apportionment:
    """Divides samples of pools among ``workers`` workers; ``readers`` are the ranks that read each pool."""

    def __init__(self, readers: Sequence[Sequence[int]], workers: int) -> None:
        self._readers = readers
        self._pools: list[list[int]] = [[] for _ in range(workers)]
        for pool, ranks in enumerate(readers):
            for rank in ranks:
                self._pools[rank].append(pool)
        self._narrow_first = sorted(range(len(readers)), key=lambda pool: len(readers[pool]))
        self._ranks = sorted(range(workers), key=self._choice)
        self._tiers = [
            [list(tier) for _, tier in groupby(sorted(ranks, key=self._choice), self._choice)]
            for ranks in readers
        ]

    def counts(self, left: Sequence[int], batches: Sequence[int]) -> list[dict[int, int]]:
        """Return by rank the samples to take of each pool: as many as the batch, fewer where there are no
        more; one more or fewer so that no sample is left alone. ``left`` are the remaining samples by pool, a
        batch of 0 means an absent worker.
        """
        step = _Step(list(left), batches, self._pools, self._readers)
        for rank, amounts in self._layout(left, batches):
            step.take(rank, min(batches[rank], round(sum(amount for _, amount in amounts))), amounts)
        for rank in self._ranks:
            step.fill(rank)
        step.join_single_shares()
        step.join_single_rests()
        return step.taken

    def spread(self, left: Sequence[int], batches: Sequence[int], most: int) -> list[int]:
        """Return batches no larger than these, of ``most`` samples together, with which the rest of the epoch
        takes no more steps than it must, and every worker's own samples are in all of them. Otherwise a
        worker with few samples would finish early, and the last steps would have only samples of the others.
        """
        readable = self._readable(left, batches)
        if not any(readable):
            return [0] * len(batches)
        steps, amounts = self._fewest_steps(readable, batches)
        totals = [sum(amount for _, amount in own) for own in amounts]
        together = min(most, math.ceil(sum(totals) / steps))
        parts = _split(together, [total if total > _ENOUGH else 0.0 for total in totals])
        found = [
            min(batch, max(part, _LEAST)) if total > _ENOUGH else 0
            for part, batch, total in zip(parts, batches, totals, strict=True)
        ]
        if not any(found):  # a single sample, which rounding would leave for ever
            rank = next(
                rank
                for rank, batch in enumerate(batches)
                if batch and any(left[p] for p in self._pools[rank])
            )
            found[rank] = min(batches[rank], _LEAST)
        while sum(found) > together and max(found) > _LEAST:  # room for those raised to the least
            found[found.index(max(found))] -= 1
        return found

    def _choice(self, rank: int) -> int:
        return len(self._pools[rank])

    def _layout(self, left: Sequence[int], batches: Sequence[int]) -> Iterator[tuple[int, Amounts]]:
        """Yield by rank the samples that a present worker takes in the fewest possible steps."""
        readable = self._readable(left, batches)
        if not any(readable):
            return
        _, amounts = self._fewest_steps(readable, batches)
        yield from ((rank, amounts[rank]) for rank in self._ranks if amounts[rank])

    def _readable(self, left: Sequence[int], batches: Sequence[int]) -> list[int]:
        """Return by pool the remaining samples that a present worker can read."""
        return [
            count if any(batches[rank] for rank in ranks) else 0
            for count, ranks in zip(left, self._readers, strict=True)
        ]

    def _fewest_steps(self, left: Sequence[int], batches: Sequence[int]) -> tuple[float, list[Amounts]]:
        """Return the least number of steps for the remaining samples, and what each worker takes in them."""
        low = high = sum(left) / sum(batches)
        amounts, missing = self._assign(left, high, batches)
        while missing > _ENOUGH:
            low, high = high, 2 * high
            amounts, missing = self._assign(left, high, batches)
        for _ in range(_HALVINGS if low < high else 0):
            middle = (low + high) / 2
            found, missing = self._assign(left, middle, batches)
            if missing > _ENOUGH:
                low = middle
            else:
                high, amounts = middle, found
        return high, amounts

    def _assign(
        self, left: Sequence[int], steps: float, batches: Sequence[int]
    ) -> tuple[list[Amounts], float]:
        """Return by rank what each worker takes in so many steps, and how many samples no worker can take."""
        free = [steps * batch for batch in batches]
        found: list[Amounts] = [[] for _ in batches]
        missing = 0.0
        for pool in self._narrow_first:
            rest = float(left[pool])
            for tier in self._tiers[pool]:
                together = sum(free[rank] for rank in tier)
                if rest <= 0 or together <= 0:
                    continue
                part = min(1.0, rest / together)
                rest -= part * together
                for rank in tier:
                    found[rank].append((pool, part * free[rank]))
                    free[rank] -= part * free[rank]
            missing += rest
        return found, missing


class _Step:
    """Moves samples from pools (``left``) to workers (``taken``, by rank and pool) and back, in one step."""

    def __init__(
        self,
        left: list[int],
        batches: Sequence[int],
        pools: Sequence[Sequence[int]],
        readers: Sequence[Sequence[int]],
    ) -> None:
        self._left, self._batches, self._pools, self._readers = left, batches, pools, readers
        self._sizes = [0] * len(batches)
        self.taken: list[dict[int, int]] = [{} for _ in batches]

    def take(self, rank: int, count: int, amounts: Amounts) -> None:
        """Give a worker ``count`` samples, or as many as are left, of pools in proportion to the amounts."""
        for (pool, _), part in zip(amounts, _split(count, [amount for _, amount in amounts]), strict=True):
            self._move(pool, rank, min(part, self._left[pool]))

    def fill(self, rank: int) -> None:
        """Complete a worker's batch from the pools that it can read, as far as they have samples."""
        room = self._batches[rank] - self._sizes[rank]
        if room > 0:
            amounts = [(pool, float(self._left[pool])) for pool in self._pools[rank] if self._left[pool]]
            self.take(rank, min(room, sum(self._left[pool] for pool, _ in amounts)), amounts)

    def join_single_shares(self) -> None:
        """Leave no worker whose batch is two or more with one sample."""
        for rank, size in enumerate(self._sizes):
            if size == 1 and self._batches[rank] >= _LEAST:
                self._more(rank) or self._steal(rank) or self._give(rank)

    def join_single_rests(self) -> None:
        """Leave no pool with one sample."""
        for pool, count in enumerate(self._left):
            if count != 1:
                continue
            if (taker := self._takes_one_more(self._readers[pool])) is not None:
                self._move(pool, taker, 1)
            elif (giver := self._has_one_too_many(pool)) is not None:
                self._move(pool, giver, -1)

    def _more(self, rank: int) -> bool:
        pool = next((pool for pool in self._pools[rank] if self._left[pool]), None)
        if pool is not None:
            self._move(pool, rank, 1)
        return pool is not None

    def _steal(self, rank: int) -> bool:
        for pool in self._pools[rank]:
            if (giver := self._has_one_too_many(pool)) is not None:
                self._move(pool, giver, -1)
                self._move(pool, rank, 1)
                return True
        return False

    def _give(self, rank: int) -> bool:
        (pool,) = self.taken[rank]
        taker = self._takes_one_more(other for other in self._readers[pool] if other != rank)
        if taker is not None:
            self._move(pool, rank, -1)
            self._move(pool, taker, 1)
        return taker is not None

    def _takes_one_more(self, ranks: Iterable[int]) -> int | None:
        sizes, batches = self._sizes, self._batches
        return next((r for r in ranks if batches[r] >= _LEAST and 0 < sizes[r] <= batches[r]), None)

    def _has_one_too_many(self, pool: int) -> int | None:
        ranks = self._readers[pool]
        return next((r for r in ranks if self._sizes[r] > _LEAST and pool in self.taken[r]), None)

    def _move(self, pool: int, rank: int, count: int) -> None:
        if not count:
            return
        self._left[pool] -= count
        self._sizes[rank] += count
        self.taken[rank][pool] = self.taken[rank].get(pool, 0) + count
        if not self.taken[rank][pool]:
            del self.taken[rank][pool]


def _split(count: int, amounts: Sequence[float]) -> list[int]:
    """Divide ``count`` in proportion to the amounts; the rest of rounding goes to the largest remainders."""
    together = sum(amounts)
    exact = [count * amount / together if together else 0.0 for amount in amounts]
    parts = [int(part) for part in exact]
    order = sorted(range(len(exact)), key=lambda number: parts[number] - exact[number])
    for number in order[: count - sum(parts)]:
        parts[number] += 1
    return parts
