"""Pure: what other work takes of the workers' processors, and what that says of their slowness.

A worker to which the part 1 - busy of its processor is left takes 1 / (1 - busy) times as long, other things
being equal. So only the ratio to what was there when its level was found counts: what made it slow beside the
processor's load is in the level. Shares of steps vary by 0.05 (standard deviation); they are averaged over
about EIGHT = 8 steps, which leaves 0.013, so a step's share is CHANGED by 5 deviations, an average by 8.
"""

from __future__ import annotations

import numpy as np

from millpond.train.balance.curve import Bools, Floats, Ints

CHANGED, CHANGED_MEAN = 0.25, 0.1
"""A share, and the average of shares, that differ so much from what they were have changed."""
_EIGHTH = 0.125
_MOST = 0.95
"""Nobody is busier: what is left to it is not known better than this."""


class CpuShare:
    """For all workers at once, NaN for who has told nothing."""

    def __init__(self, size: int) -> None:
        self._now, self._mean = np.full(size, np.nan), np.full(size, np.nan)
        self._then = np.full(size, np.nan)  # the average when the level was found

    def observe(self, busy: Floats) -> None:
        """By rank the part of the processor, 0 to 1, that other work takes in this step."""
        self._now = np.clip(busy, 0.0, _MOST)
        step = self._now - self._mean
        step *= _EIGHTH
        if (unknown := np.isnan(step)).any():
            step[unknown] = 0.0
            for array in (self._mean, self._then):
                np.copyto(array, self._now, where=np.isnan(array))
        self._mean += step

    def changed(self) -> Ints:
        """Whose share in this step is another than when its level was found."""
        return np.flatnonzero(np.abs(self._now - self._then) > CHANGED)

    def changed_mean(self, ranks: Ints) -> Ints:
        """Those of them whose average is another."""
        found: Ints = ranks[np.abs(self._mean[ranks] - self._then[ranks]) > CHANGED_MEAN]
        return found

    def factor(self, ranks: Ints) -> Floats:
        """How many times as long they take as when their levels were found, by this step's share."""
        return _ratio(self._then[ranks], self._now[ranks])

    def factor_mean(self, ranks: Ints) -> Floats:
        """By the average."""
        return _ratio(self._then[ranks], self._mean[ranks])

    def slowness(self, ranks: Ints) -> Floats:
        """What their load alone accounts for; NaN where this step told nothing."""
        return np.where(np.isnan(self._now[ranks]), np.nan, 1 / (1 - self._mean[ranks]))

    def settle(self, ranks: Ints) -> None:
        """The levels of these are found now."""
        known = ranks[np.isfinite(self._now[ranks])]
        self._mean[known] = self._then[known] = self._now[known]

    def settle_mean(self, ranks: Ints) -> None:
        """The levels of these follow from their averages."""
        self._then[ranks] = self._mean[ranks]

    def track(self, measured: Bools) -> None:
        """The levels of those who were measured hold for their present average."""
        np.copyto(self._then, self._mean, where=measured)

    def forget(self, rank: int) -> None:
        """It was not there."""
        self._now[rank] = self._mean[rank] = self._then[rank] = np.nan


def _ratio(then: Floats, now: Floats) -> Floats:
    found: Floats = (1 - then) / (1 - now)
    return found
