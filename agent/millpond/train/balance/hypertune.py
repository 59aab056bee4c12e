# SPDX-License-Identifier: Apache-2.0
"""Pure: the rules of the Stannis paper's HyperTune (section III-C): when a batch changes, and to what.

Equation 2 says when. For the new batch the paper has three methods: the inverse of the curve, its first;
equation 3, its second; and the usage of the processor, its third.

As printed, equation 3 weighs the batches of two neighbouring pairs the wrong way round: at the speed of one
pair it gives the batch of the other. At its normal speed a worker with a batch of 180 would so get that of
the pair below. ``between_pairs`` therefore weighs them the right way round; ``as_printed`` is the equation as
it stands in the paper, which no policy uses.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from millpond.train.balance.curve import Bools, Curve, Floats, Ints

THRESHOLD, IN_A_ROW = 0.2, 5
"""A decline index above THRESHOLD flags a step; IN_A_ROW flagged steps make a new batch."""
_SPEED, _PROGRESS = 0.7, 0.3
WINDOW, _LAST = 10, 5
"""Steps whose usage of the processor is kept, and those of them whose mean is the present usage."""
_LEAST_USAGE = 0.05
"""Usages are cut here: how little is left to a worker is not known better than this."""


def decline_index(normal: Floats, now: Floats, left: float) -> Floats:
    """Return each worker's decline index, 0.7 (SP - SP_i) / SP + 0.3 (N - i) / N (equation 2).

    Arguments: the ``normal`` speed SP and that of the step, SP_i, of any unit; the part of the epoch that is
    ``left``, which is (N - i) / N in step i of N.
    """
    index: Floats = _SPEED * (normal - now) / normal + _PROGRESS * left
    return index


def between_pairs(curve: Curve, speed: float) -> float:
    """Return the batch of a ``speed`` in samples per second, by the line between the neighbouring measured
    (batch, speed) pairs (equation 3 with its weights the right way round). Below all pairs it is the smallest
    batch, above all the batch of the fastest.
    """
    low, high, part = _neighbours(curve, speed)
    return low * (1 - part) + high * part


def as_printed(curve: Curve, speed: float) -> float:
    """Return the batch of a ``speed`` by equation 3 with the weights as the paper prints them."""
    low, high, part = _neighbours(curve, speed)
    return low * part + high * (1 - part)


def inverse(curve: Curve, speed: float) -> float:
    """Return the largest batch whose speed on the fitted curve is no more than ``speed``, the smallest
    measured one if there is none (the paper's first method).
    """
    batches = np.arange(curve.batches[0], curve.peak + 1)
    slow_enough = batches[batches / curve.time(batches) <= speed]
    return float(slow_enough[-1] if slow_enough.size else curve.batches[0])


def _neighbours(curve: Curve, speed: float) -> tuple[float, float, float]:
    """Return the batches of the pairs (batch, speed) below and above a speed, up to the peak, and the part of
    the way from the first to the second pair's speed; twice the same batch, and 0, at an end.
    """
    pairs = [(float(b), b / s) for b, s in zip(curve.batches, curve.seconds, strict=True) if b <= curve.peak]
    rising = [pair for place, pair in enumerate(pairs) if all(pair[1] > other[1] for other in pairs[:place])]
    above = bisect_right([pair[1] for pair in rising], speed)
    low, high = rising[max(0, above - 1)], rising[min(above, len(rising) - 1)]
    return low[0], high[0], (speed - low[1]) / (high[1] - low[1]) if low != high else 0.0


class CpuUsage:
    """Keeps the usage of each worker's processor in its last WINDOW steps: the part, 0 to 1, that the worker
    itself has (the paper's third method). A batch is proportional to the mean of the last five steps over the
    normal usage, which is the largest mean of the five steps before them.
    """

    def __init__(self, size: int) -> None:
        self._window = np.full((WINDOW, size), np.nan)
        self._normal, self._stands = np.full(size, np.nan), np.full(size, np.nan)
        self._more = np.zeros(size, dtype=np.int64)

    def observe(self, usage: Floats, left: float) -> Ints:
        """Take in the usages of a step, NaN if unknown. Return the ranks that have had more than that for
        which their batches were chosen IN_A_ROW times: equation 2 with the gain in place of the decline.
        """
        known = np.isfinite(usage)
        usage = np.where(known, np.maximum(usage, _LEAST_USAGE), np.nan)
        self._window = np.concatenate([self._window[1:], usage[None]])
        self._normal = np.fmax(self._normal, _means(self._window[:-_LAST]))
        gain = (usage - self._stands) / self._stands
        flagged = (gain > 0) & (_SPEED * gain + _PROGRESS * left > THRESHOLD)
        self._more = flags(self._more, flagged, known)
        return np.flatnonzero(self._more >= IN_A_ROW)

    def part(self, rank: int) -> float:
        """Return the present usage over the normal one; a batch is chosen for it. NaN if it is unknown."""
        now = float(_means(self._window[-_LAST:])[rank])
        self._stands[rank], self._more[rank] = now, 0
        return float(np.minimum(1.0, now / self._normal[rank]))  # of NaN it is NaN

    def forget(self, rank: int) -> None:
        """Discard the usages of a worker that was absent."""
        self._window[:, rank] = self._normal[rank] = self._stands[rank] = np.nan
        self._more[rank] = 0


def flags(before: Ints, flagged: Bools, worked: Bools) -> Ints:
    """Return how many steps in a row have been flagged, of those in which each worker took part."""
    return np.where(worked, np.where(flagged, before + 1, 0), before)


def _means(usages: Floats) -> Floats:
    """Return the means over the known steps, by rank; NaN where none is known."""
    known = np.isfinite(usages).sum(axis=0)
    return np.where(known > 0, np.nansum(usages, axis=0) / np.maximum(known, 1), np.nan)
