# SPDX-License-Identifier: Apache-2.0
"""Pure: batches with which all workers finish a step together.

In a synchronous step all wait for the slowest worker, so a step of T seconds does the most work if every
worker has the largest batch that takes it no longer than T (Stannis, section IV-A): B(T) samples in all, B(T)
/ T per second. Between two times at which a worker comes to its cap, a longer step is a gain for the workers
below their caps, whose fixed costs weigh less in it, and a loss for the workers at their caps, which wait. So
the best T is one at which a worker comes to its cap. The most influential kind of worker, that with the
greatest speed in sum, sets it, as in the paper, unless the time of another's cap is WORTH_IT: that happens
where no kind outweighs all others. A host of 33.4 images/s that is interrupted takes 10.9 s for its batch;
with 4 devices of 2.78, whose caps take 5.4 s, its T reaches 0.80 of the speeds that are there, theirs 0.97.

T is SHORTEST at least. Below what scheduling alone may add to a step, a slow worker cannot be told from one
that was disturbed, and a device whose smallest batch takes longer than the largest of another would sit out
for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from millpond.train.balance.curve import Bools, Curve, Floats, Ints
from millpond.train.balance.slowness import JITTER

LEAST_BATCH = 2
"""BatchNorm has no variance of one sample: a worker without the time for two sits out."""

SHORTEST = JITTER
"""Seconds of a step, below which no difference between workers is believed."""

WORTH_IT = 1.005
"""How many times as many samples per second another T brings, or else T stays by the most influential kind:
plans that follow each change of a level would be as good and never rest.
"""
QUANTILES = 8
"""Of each kind, in how many equal parts the times at which its members come to their caps are tried as T."""
MOST_TRIED = 64
"""The members of a larger kind are represented by so many of them where it is tried."""

_ROUNDING = 1e-9
_AS_ITS_KIND = 0.05
"""Relative: a member that differs by less from its kind is as fast."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Workers with the same curve; ``most`` is the largest batch that their memory takes, ``least`` one that
    they must be able to take.
    """

    curve: Curve
    most: int
    least: int = LEAST_BATCH

    @property
    def cap(self) -> int:
        """Return the largest batch that helps: within memory, at most the curve's peak, unless ``least`` is
        more. 0 for none.
        """
        cap = min(self.most, max(self.curve.peak, self.least, LEAST_BATCH))
        return cap if cap >= LEAST_BATCH else 0


@dataclass(frozen=True, slots=True)
class Measured:
    """A worker's profile: the name of its kind, (batch, seconds) in any order, the largest batch that its
    memory takes, and one that it must be able to take.
    """

    kind: str
    points: Sequence[tuple[int, float]]
    most: int
    least: int = LEAST_BATCH


def kinds_of(members: Sequence[Measured]) -> tuple[list[WorkerKind], list[int], list[float]]:
    """Group measured workers into kinds. Return the kinds, and of each worker the index of its kind and its
    level: how many times as long as on the curve of its kind it took, 1.0 if that is within 5 %. A kind's
    curve is the median of its members'; members whose memory takes less than the peak are a kind of their own
    with the same curve. Raises ValueError for points that make no curve.
    """
    own = [Curve.fit(member.points) for member in members]
    curves = {
        name: _middle([curve for curve, member in zip(own, members, strict=True) if member.kind == name])
        for name in dict.fromkeys(member.kind for member in members)
    }
    found = [(m.kind, WorkerKind(curves[m.kind], m.most, m.least).cap) for m in members]
    distinct = list(dict.fromkeys(found))
    kinds = [WorkerKind(curves[name], cap, cap) for name, cap in distinct]
    levels = [_level(curve, curves[member.kind]) for curve, member in zip(own, members, strict=True)]
    return kinds, [distinct.index(kind) for kind in found], levels


def _middle(curves: Sequence[Curve]) -> Curve:
    """Return the median of curves, which ascends as each of them does."""
    batches = sorted({batch for curve in curves for batch in curve.batches})
    times = np.median([curve.time(np.array(batches)) for curve in curves], axis=0)
    return Curve(tuple(batches), tuple(times.tolist()))


def _level(own: Curve, kind: Curve) -> float:
    usual = kind.time(np.array(own.batches)).tolist()
    level = median(seconds / time for seconds, time in zip(own.seconds, usual, strict=True))
    return 1.0 if abs(level - 1) <= _AS_ITS_KIND else level


class Cohort:
    """The workers of a job: ``members`` has for each, in the order of their ranks, the index of its kind.

    In all methods ``slowness[i]`` is how many times as long as its curve says worker i takes, inf if it is
    absent.
    """

    def __init__(self, kinds: Sequence[WorkerKind], members: Sequence[int]) -> None:
        self.kinds = tuple(kinds)
        self.members: Ints = np.asarray(members, dtype=np.int64)
        self.size = len(self.members)
        self._tables = [kind.curve.time(np.arange(kind.cap + 2)) for kind in self.kinds]  # by batch, from 0
        self._fits = [_from_two(table[1:-1]) for table in self._tables]  # by batch, from 1
        self._ranks = [_span(np.flatnonzero(self.members == number)) for number in range(len(self.kinds))]
        self._speeds = [kind.curve.speed if kind.cap else 0.0 for kind in self.kinds]  # 0: no memory
        # Seconds of the cap, and a little more: T divided by a slowness must not be less because of rounding.
        self._longest = [(1 + _ROUNDING) * float(table[-2]) for table in self._tables]
        self.caps: Ints = np.array([kind.cap for kind in kinds], dtype=np.int64)[self.members]
        starts = np.cumsum([0, *(len(table) for table in self._tables)])
        self._table, self._starts = np.concatenate(self._tables), starts[self.members]

    def step_seconds(self, slowness: Floats) -> float:
        """Return T: the seconds of the typical worker of the most influential kind for the batch at its peak,
        or for as much as its memory takes; those of another worker, if that brings more samples per second by
        WORTH_IT; at least SHORTEST. 0 if no worker is present.
        """
        there = [_there(slowness[ranks]) for ranks in self._ranks]
        weights = [speed * float(np.sum(1 / slow)) for speed, slow in zip(self._speeds, there, strict=True)]
        chosen = weights.index(max(weights))
        if not weights[chosen]:
            return 0.0
        usual = self._longest[chosen] * float(there[chosen][len(there[chosen]) // 2])
        seconds, speeds = self._tried(usual, there)
        best = int(np.argmax(speeds))
        return float(seconds[best] if speeds[best] >= WORTH_IT * speeds[0] else seconds[0])

    def _tried(self, usual: float, there: Sequence[Floats]) -> tuple[Floats, Floats]:
        """Return times that a step could take, the usual one first, and the samples per second of each.
        ``there`` has for each kind the slowness of its present members, ascending.
        """
        able = [number for number, slow in enumerate(there) if slow.size and self._speeds[number]]
        some = [(number, *_representatives(there[number])) for number in able]
        caps = [self._longest[number] * _quantiles(slow) for number, slow, _ in some]
        seconds = np.maximum(np.concatenate([[usual], *caps]), SHORTEST)
        samples = np.zeros(len(seconds), dtype=np.int64)
        for number, slow, alike in some:
            samples += np.searchsorted(self._fits[number], seconds[:, None] / slow, side="right") @ alike
        return seconds, samples / seconds

    def batches(self, seconds: float, slowness: Floats) -> Ints:
        """Return the largest batch of each worker within ``seconds``; 0 for workers that sit out."""
        found = np.zeros(self.size, dtype=np.int64)
        for times, ranks in zip(self._fits, self._ranks, strict=True):
            found[ranks] = np.searchsorted(times, seconds / slowness[ranks], side="right")
        return found

    def batches_for(self, ranks: Ints, seconds: float, slowness: Floats) -> Ints:
        """Return the same as ``batches`` for some workers."""
        found = np.zeros(len(ranks), dtype=np.int64)
        for number, times in enumerate(self._fits):
            own = self.members[ranks] == number
            found[own] = np.searchsorted(times, seconds / slowness[ranks[own]], side="right")
        return found

    def times(self, batches: Ints, slowness: Floats) -> Floats:
        """Return the seconds of each worker for its batch, which is one more than its cap at most; here every
        slowness is finite.
        """
        found = self._table[self._starts + batches]
        found *= slowness
        return found

    def nearest(self, total: int, present: Bools) -> int:
        """Return the largest global batch up to ``total`` that the present workers can have; 0 if none."""
        caps = self.caps[present]
        most = min(total, int(caps.sum()))
        if most % 2 and caps.max() <= LEAST_BATCH:
            most -= 1
        return most if most >= LEAST_BATCH else 0

    def batches_of(self, total: int, slowness: Floats) -> Ints:
        """Return batches that sum up to ``total``. If that is less than in a step of T, these are the batches
        of that step, each smaller by the same part: times of smaller batches differ so little that nothing is
        to be won by it, and every worker's data stays in every step. Otherwise they are the batches with
        which the slowest worker takes the least time. Raises ValueError if ``total`` is more than all can
        take at once, less than the smallest batch, or odd where no worker takes three.
        """
        present = np.isfinite(slowness)
        if total < LEAST_BATCH or self.nearest(total, present) != total:
            most = self.nearest(int(self.caps[present].sum()), present)
            raise ValueError(
                f"a global batch of {total}: {LEAST_BATCH} to {most} are possible, and odd ones "
                "if somebody takes three samples"
            )
        usual = self.batches(self.step_seconds(slowness), slowness)
        if LEAST_BATCH * int(np.count_nonzero(usual)) <= total <= int(usual.sum()):
            return _scaled(usual, total)
        caps, slowness = np.where(present, self.caps, 0), np.where(present, slowness, 1.0)
        low, high = 0.0, float(np.max(self.times(caps, slowness))) * (1 + _ROUNDING)
        for _ in range(60):  # halving leaves less than a float of it
            middle = (low + high) / 2
            if int(np.minimum(self.batches(middle, slowness), caps).sum()) < total:
                low = middle
            else:
                high = middle
        return self._without(np.minimum(self.batches(high, slowness), caps), total, caps, slowness)

    def _without(self, batches: Ints, total: int, caps: Ints, slowness: Floats) -> Ints:
        """Take samples away where they take longest, until ``total`` are left; of a batch of two, both."""
        while (surplus := int(batches.sum()) - total) > 0:
            fewest = LEAST_BATCH + 1 if surplus < LEAST_BATCH else LEAST_BATCH
            rank = self._slowest(np.where(batches >= fewest, batches, 0), slowness)
            if batches[rank] < fewest:
                return self._one_less(batches, caps, slowness)
            batches[rank] -= LEAST_BATCH if batches[rank] == LEAST_BATCH else 1
        return batches

    def _one_less(self, batches: Ints, caps: Ints, slowness: Floats) -> Ints:
        """Drop one sample where all batches are two or none: one becomes three, and the slowest sit out."""
        three = np.full(self.size, LEAST_BATCH + 1)
        able = np.where(caps > LEAST_BATCH, self.times(np.minimum(three, self.caps + 1), slowness), np.inf)
        rank = int(np.argmin(able))
        others, surplus = batches.copy(), LEAST_BATCH + 2 - int(batches[rank])
        others[rank] = 0
        for _ in range(surplus // LEAST_BATCH):
            others[self._slowest(others, slowness)] = 0
        others[rank] = LEAST_BATCH + 1
        return others

    def _slowest(self, batches: Ints, slowness: Floats) -> int:
        return int(np.argmax(self.times(batches, slowness)))


def _scaled(batches: Ints, total: int) -> Ints:
    """Return smaller batches that sum up to ``total``, in proportion, but none less than the smallest: the
    largest are made so much smaller still. The rest of the division goes to the largest remainders.
    """
    together = int(batches.sum())
    found, remainders = np.divmod(batches * total, together)
    order = np.argsort(-remainders, kind="stable")
    found[order[: total - int(found.sum())]] += 1
    lifted = np.where(batches > 0, np.maximum(found, LEAST_BATCH), 0)
    while (surplus := int(lifted.sum()) - total) > 0:
        largest = np.flatnonzero(lifted == lifted.max())[:surplus]
        lifted[largest] -= 1
    return lifted


def _there(slowness: Floats) -> Floats:
    """Return the slowness of the present workers, ascending."""
    slow = np.sort(slowness)  # faster than np.partition
    return slow[: int(np.searchsorted(slow, np.inf))]


def _representatives(slow: Floats) -> tuple[Floats, Ints]:
    """Return some of ascending values, and for how many each stands, as the middle one of them."""
    count = min(len(slow), MOST_TRIED)
    ends = np.arange(count + 1) * len(slow) // count
    return slow[(ends[:-1] + ends[1:]) // 2], np.diff(ends)


def _quantiles(slow: Floats) -> Floats:
    """Return the quantiles of ascending values, from the least to the greatest."""
    return slow[np.arange(QUANTILES + 1) * (len(slow) - 1) // QUANTILES]


def _from_two(times: Floats) -> Floats:
    """Let one sample take as long as two, so that no worker has time for one alone."""
    return np.concatenate([times[1:LEAST_BATCH], times[1:]])


def _span(ranks: Ints) -> Ints | slice:
    """Return a slice where the ranks follow each other: a view instead of a copy."""
    if ranks.size and ranks[-1] - ranks[0] + 1 == ranks.size:
        return slice(int(ranks[0]), int(ranks[-1]) + 1)
    return ranks
