"""Pure: batches with which all workers finish a step together.

In a lock step everyone waits for the slowest, so a step of T seconds does the most work if every worker has
the largest batch that takes it no longer than T (Stannis, section IV-A). T itself is the time in which the
most influential kind of worker, that with the greatest speed in sum, does the batch at its curve's peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millpond.train.balance.curve import Curve, Floats, Ints

LEAST_BATCH = 2
"""BatchNorm has no variance of one sample: whoever has not the time for two sits out."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Kind:
    """Workers with the same curve; ``most`` is the largest batch that their memory takes."""

    curve: Curve
    most: int

    @property
    def cap(self) -> int:
        """The largest batch that helps: within memory, and no further than the curve's peak. 0 for none."""
        cap = min(self.most, max(self.curve.peak, LEAST_BATCH))
        return cap if cap >= LEAST_BATCH else 0


class Crew:
    """Who trains: ``members`` has for each worker, in the order of their ranks, the index of its kind."""

    def __init__(self, kinds: Sequence[Kind], members: Sequence[int]) -> None:
        self.kinds = tuple(kinds)
        self.members: Ints = np.asarray(members, dtype=np.int64)
        self.size = len(self.members)
        self._tables = [kind.curve.time(np.arange(kind.cap + 2)) for kind in self.kinds]  # by batch, from 0
        self._ranks = [np.flatnonzero(self.members == number) for number in range(len(self.kinds))]
        self.caps: Ints = np.array([kind.cap for kind in kinds], dtype=np.int64)[self.members]

    def step_seconds(self, slowness: Floats) -> float:
        """T, where worker i takes ``slowness[i]`` times as long as its curve says: what the typical worker of
        the most influential kind takes for the batch at its peak, or for as much as its memory takes.
        """
        weights = [
            float(np.sum(kind.curve.speed / slowness[ranks]))
            for kind, ranks in zip(self.kinds, self._ranks, strict=True)
        ]
        chosen = weights.index(max(weights))
        slow, middle = slowness[self._ranks[chosen]], len(self._ranks[chosen]) // 2
        return float(self._tables[chosen][self.kinds[chosen].cap] * np.partition(slow, middle)[middle])

    def batches(self, seconds: float, slowness: Floats) -> Ints:
        """The batch of each worker that takes it no longer than ``seconds``; 0 for who sits out."""
        found = np.zeros(self.size, dtype=np.int64)
        for table, ranks in zip(self._tables, self._ranks, strict=True):
            found[ranks] = np.searchsorted(table[1:-1], seconds / slowness[ranks], side="right")
        return np.where(found < LEAST_BATCH, 0, found)

    def times(self, batches: Ints, slowness: Floats) -> Floats:
        """Seconds that each worker takes for its batch, which is one more than its cap at most."""
        found = np.zeros(self.size)
        for table, ranks in zip(self._tables, self._ranks, strict=True):
            found[ranks] = table[batches[ranks]]
        return found * slowness

    def batches_of(self, total: int, slowness: Floats) -> Ints:
        """Batches that sum up to ``total``, in the least time for the slowest. Raises ValueError if it is
        more than all can take at once, less than the smallest batch, or odd where all have two or none.
        """
        most = int(self.caps.sum())
        if not LEAST_BATCH <= total <= most:
            raise ValueError(f"a global batch of {total}: {LEAST_BATCH} to {most} are possible")
        low, high = 0.0, float(np.max(self.times(self.caps, slowness))) * (1 + _ROUNDING)
        for _ in range(60):  # halving leaves less than a float of it
            middle = (low + high) / 2
            if int(self.batches(middle, slowness).sum()) < total:
                low = middle
            else:
                high = middle
        return self._without(self.batches(high, slowness), total, slowness)

    def _without(self, batches: Ints, total: int, slowness: Floats) -> Ints:
        """Take samples away where they take longest, until ``total`` are left. Who has two loses both."""
        batches = batches.copy()
        while (surplus := int(batches.sum()) - total) > 0:
            fewest = LEAST_BATCH + 1 if surplus < LEAST_BATCH else LEAST_BATCH
            times = np.where(batches >= fewest, self.times(batches, slowness), -1.0)
            rank = int(np.argmax(times))
            if times[rank] < 0:
                return self._one_less(batches, slowness)
            batches[rank] -= LEAST_BATCH if batches[rank] == LEAST_BATCH else 1
        return batches

    def _one_less(self, batches: Ints, slowness: Floats) -> Ints:
        """Where all have two and one sample is too many: the slowest sits out, another takes one more."""
        batches[int(np.argmax(self.times(batches, slowness)))] = 0
        room = np.where((batches > 0) & (batches < self.caps), self.times(batches + 1, slowness), np.inf)
        rank = int(np.argmin(room))
        if not np.isfinite(room[rank]):
            raise ValueError("an odd global batch, and nobody takes more than two samples")
        batches[rank] += 1
        return batches
