# SPDX-License-Identifier: Apache-2.0
"""Pure: slowness of workers, as the share of their processors that other work takes accounts for it.

A worker to which the part 1 - busy of its processor is left takes 1 / (1 - busy) times as long, other things
being equal. So only the ratio to the share at the time when its level was found counts: other causes of
slowness are in the level. Shares of steps vary by 0.05 (standard deviation); they are averaged over
about EIGHT = 8 steps, which leaves 0.013, so a step's share is CHANGED by 5 deviations, an average by 8.
"""

from __future__ import annotations

import numpy as np

from millpond.train.balance.curve import Bools, Floats, Ints

CHANGED, CHANGED_MEAN = 0.25, 0.1
"""Differences by which a share, and the average of shares, count as changed."""
_EIGHTH = 0.125
_MOST = 0.95
"""Shares are cut here: how little is left to a worker is not known better than this."""


class CpuShare:
    """Tracks the busy shares of all workers, NaN for workers that have reported none."""

    def __init__(self, size: int) -> None:
        self._now, self._mean = np.full(size, np.nan), np.full(size, np.nan)
        self._then = np.full(size, np.nan)  # the average when the level was found

    def observe(self, busy: Floats) -> None:
        """Take in by rank the part of the processor, 0 to 1, that other work takes in this step."""
        self._now = np.clip(busy, 0.0, _MOST)
        step = self._now - self._mean
        step *= _EIGHTH
        if (unknown := np.isnan(step)).any():
            step[unknown] = 0.0
            for array in (self._mean, self._then):
                np.copyto(array, self._now, where=np.isnan(array))
        self._mean += step

    def changed(self) -> Ints:
        """Return the ranks whose share in this step differs from that when their level was found."""
        return np.flatnonzero(np.abs(self._now - self._then) > CHANGED)

    def changed_mean(self, ranks: Ints) -> Ints:
        """Return those of ``ranks`` whose average share differs from that when their level was found."""
        found: Ints = ranks[np.abs(self._mean[ranks] - self._then[ranks]) > CHANGED_MEAN]
        return found

    def factor(self, ranks: Ints) -> Floats:
        """Return the slowness of ``ranks`` over that when their levels were found, by this step's share."""
        return _ratio(self._then[ranks], self._now[ranks])

    def factor_mean(self, ranks: Ints) -> Floats:
        """Return the same as ``factor`` by the average share."""
        return _ratio(self._then[ranks], self._mean[ranks])

    def slowness(self, ranks: Ints) -> Floats:
        """Return the slowness that load alone accounts for; NaN where this step has no share."""
        return np.where(np.isnan(self._now[ranks]), np.nan, 1 / (1 - self._mean[ranks]))

    def rebase(self, ranks: Ints) -> None:
        """Take this step's shares as the reference: the levels of ``ranks`` have just been found."""
        known = ranks[np.isfinite(self._now[ranks])]
        self._mean[known] = self._then[known] = self._now[known]

    def rebase_mean(self, ranks: Ints) -> None:
        """Take the average shares as the reference: the levels of ``ranks`` follow from them."""
        self._then[ranks] = self._mean[ranks]

    def track(self, measured: Bools) -> None:
        """Take the average shares of measured workers as the reference: their levels hold for them."""
        np.copyto(self._then, self._mean, where=measured)

    def forget(self, rank: int) -> None:
        """Discard the shares of a worker that was absent."""
        self._now[rank] = self._mean[rank] = self._then[rank] = np.nan


def _ratio(then: Floats, now: Floats) -> Floats:
    found: Floats = (1 - then) / (1 - now)
    return found
