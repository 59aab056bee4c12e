"""Pure: the batches of a group's ranks, whose sum stays the same: tried out at first, then of equal times.

Everyone waits for everyone here, and every rank computes in every step, or it could not tell that it is
faster again. So nobody sits out: the smallest batch is two samples, whatever they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from statistics import median

import numpy as np

from millpond.base.errors import LocalError
from millpond.train.balance.controller import BalanceController
from millpond.train.balance.curve import Curve, Floats, Ints
from millpond.train.balance.equal_time import LEAST_BATCH, Cohort, WorkerKind

_TRIED = (2, 1, 3)
"""A rank's share of the first steps, in turn, where an equal one is 2."""
_TRIES = 3
"""How often each of these is tried, after a step that does not count, in which torch fetches memory."""
_DEARER = 0.1
"""Part of a sample's mean time by which one more makes a batch longer at least. Where all batches take the
same, noise would decide who gets most samples.
"""


class BatchTuner:
    """Batches that sum up to ``total`` for so many ``ranks``; equal ones for ever if not ``balanced``.
    Raises LocalError for a total of less than two each.
    """

    def __init__(self, total: int, ranks: int, *, balanced: bool) -> None:
        if total < LEAST_BATCH * ranks:
            least = LEAST_BATCH * ranks
            raise LocalError(f"a batch of {total} is too small: {ranks} ranks need {least} or more")
        self._total = total
        self._measured: list[list[tuple[int, float]]] = [[] for _ in range(ranks)]
        self._steps = 0
        self._controller: BalanceController | None = None
        self._balanced = balanced and ranks > 1
        self.batches = _parts(total, [1] * ranks)
        """Of the next step, by rank."""

    def among(self, able: Sequence[bool]) -> tuple[int, ...]:
        """``batches`` if not all are able to take samples: the others take theirs, too, in proportion."""
        if all(able):
            return self.batches
        return _parts(self._total, [own if can else 0 for own, can in zip(self.batches, able, strict=True)])

    def observe(self, batches: Sequence[int], seconds: Sequence[float]) -> None:
        """What each rank did in a step, 0 for nothing, and what it took. Changes ``batches``."""
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
    """A rank. Samples that it does not take are left to others, so its curve's peak is no reason to stop."""

    @property
    def cap(self) -> int:
        """As much as there is."""
        return self.most


class _Waiting(Cohort):
    """Ranks with a fixed total."""

    def step_seconds(self, _slowness: Floats) -> float:
        """None that follows from the curves: ``batches_of`` then looks for the least that the total takes."""
        return 0.0


def _parts(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """The smallest batch for everyone with a weight, and the rest in proportion to the weights."""
    least = [LEAST_BATCH if weight else 0 for weight in weights]
    rest, whole = total - sum(least), sum(weights)
    ends = [rest * weight // whole for weight in accumulate(weights)]
    return tuple(own + end - begin for own, (begin, end) in zip(least, pairwise([0, *ends]), strict=True))


def _for_everyone(batches: Ints) -> tuple[int, ...]:
    """The smallest batch for those who have none; the largest are made so much smaller."""
    total = int(batches.sum())
    found = np.maximum(batches, LEAST_BATCH)
    while int(found.sum()) > total:
        found[np.argmax(found)] -= 1
    return tuple(found.tolist())


def _line(measured: Sequence[tuple[int, float]]) -> Curve:
    """Seconds by batch, in any order, at least one: the median of all slopes between two of them, and of the
    heights with it (Theil and Sen), which a few steps that were disturbed do not move.
    """
    pairs = [pair for pair in combinations(measured, 2) if pair[0][0] != pair[1][0]]
    mean = median(time / batch for batch, time in measured)
    slope = median([(a[1] - b[1]) / (a[0] - b[0]) for a, b in pairs] or [mean])
    slope = min(max(slope, _DEARER * mean), mean)
    start = max(0.0, median(time - slope * batch for batch, time in measured))
    largest = max(LEAST_BATCH, *(batch for batch, _ in measured))
    return Curve((1, largest), (start + slope, start + slope * largest))
