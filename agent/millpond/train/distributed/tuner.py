# SPDX-License-Identifier: Apache-2.0
"""Pure: the batches of a process group's ranks, with a fixed sum: tried out at first, then of equal times.

In an all-reduce all ranks wait for all, and every rank computes in every step, as otherwise it could not show
that it is faster again. So no rank sits out: the smallest batch is two samples, however long they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from statistics import median

import numpy as np

from millpond.base.errors import LocalError
from millpond.train import error_texts
from millpond.train.balance.controller import BalanceController
from millpond.train.balance.curve import Curve, Floats, Ints
from millpond.train.balance.equal_time import LEAST_BATCH, Cohort, WorkerKind

_TRIED = (2, 1, 3)
"""A rank's share of the first steps, in turn, where an equal one is 2."""
_TRIES = 3
"""How often each of these is tried, after a step that does not count, in which torch fetches memory."""
_DEARER = 0.1
"""Part of a sample's mean time by which one more makes a batch longer at least. Where all batches take the
same time, noise would decide which rank gets most samples.
"""


class BatchTuner:
    """Chooses batches of ``ranks`` ranks that sum up to ``total``; equal ones for ever if not ``balanced``.
    Raises LocalError for a total of less than two each.
    """

    def __init__(self, total: int, ranks: int, *, balanced: bool) -> None:
        if total < LEAST_BATCH * ranks:
            least = LEAST_BATCH * ranks
            raise LocalError(error_texts.SMALL_BATCH(total, ranks, least))
        self._total = total
        self._measured: list[list[tuple[int, float]]] = [[] for _ in range(ranks)]
        self._steps = 0
        self._controller: BalanceController | None = None
        self._balanced = balanced and ranks > 1
        self.batches = _parts(total, [1] * ranks)
        """Batches of the next step, by rank."""

    def among(self, able: Sequence[bool]) -> tuple[int, ...]:
        """Return ``batches`` with those of ranks that are not ``able`` divided among the others."""
        if all(able):
            return self.batches
        return _parts(self._total, [own if can else 0 for own, can in zip(self.batches, able, strict=True)])

    def observe(self, batches: Sequence[int], seconds: Sequence[float]) -> None:
        """Take in the batch of each rank in a step, 0 for none, and its seconds. Changes ``batches``."""
        if not self._balanced:
            return
        self._steps += 1
        if self._controller is None:
            self._try(batches, seconds)
        else:
            self._controller.observe(np.array(batches, np.int64), np.array(seconds, np.float64))
        if self._controller is not None:
            self.batches = _for_everyone(self._controller.plan.batches)

    def _try(self, batches: Sequence[int], seconds: Sequence[float]) -> None:
        for own, batch, time in zip(self._measured, batches, seconds, strict=True):
            if self._steps > 1 and batch and time > 0:
                own.append((batch, time))
        if self._steps > _TRIES * len(_TRIED) and all(self._measured):
            kinds = [_Measured(_line(own), self._total) for own in self._measured]
            self._controller = BalanceController(
                _Waiting(kinds, range(len(kinds))), total=self._total, patience=None
            )
        else:
            turns = range(self._steps, self._steps + len(batches))
            self.batches = _parts(self._total, [_TRIED[turn % len(_TRIED)] for turn in turns])


@dataclass(frozen=True, slots=True)
class _Measured(WorkerKind):
    """A measured rank. Samples it does not take are left to others, so its curve's peak is no limit."""

    @property
    def cap(self) -> int:
        """Return the whole total."""
        return self.most


class _Waiting(Cohort):
    """Ranks with a fixed total, which all wait for all."""

    def step_seconds(self, _slowness: Floats) -> float:
        """Return 0: no time follows from the curves, so ``batches_of`` looks for the least for the total."""
        return 0.0


def _parts(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Divide ``total``: the smallest batch for each rank with a weight, the rest in proportion."""
    least = [LEAST_BATCH if weight else 0 for weight in weights]
    rest, whole = total - sum(least), sum(weights)
    ends = [rest * weight // whole for weight in accumulate(weights)]
    return tuple(own + end - begin for own, (begin, end) in zip(least, pairwise([0, *ends]), strict=True))


def _for_everyone(batches: Ints) -> tuple[int, ...]:
    """Give ranks without a batch the smallest; the largest batches are made so much smaller."""
    total = int(batches.sum())
    found = np.maximum(batches, LEAST_BATCH)
    while int(found.sum()) > total:
        found[np.argmax(found)] -= 1
    return tuple(found.tolist())


def _line(measured: Sequence[tuple[int, float]]) -> Curve:
    """Fit a line to (batch, seconds), in any order, at least one: the median of all slopes between two
    points, and of the heights with it (Theil and Sen), which a few disturbed steps do not move.
    """
    pairs = [pair for pair in combinations(measured, 2) if pair[0][0] != pair[1][0]]
    mean = median(time / batch for batch, time in measured)
    slope = median([(a[1] - b[1]) / (a[0] - b[0]) for a, b in pairs] or [mean])
    slope = min(max(slope, _DEARER * mean), mean)
    start = max(0.0, median(time - slope * batch for batch, time in measured))
    largest = max(LEAST_BATCH, *(batch for batch, _ in measured))
    return Curve((1, largest), (start + slope, start + slope * largest))
