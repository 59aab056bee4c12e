# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): the coordinate-wise trimmed mean (Yin et al. 2018, arXiv:1803.01498)."""

from __future__ import annotations

import math

import numpy as np

from millpond.aggregate.kernels import Totals, Vector
from millpond.aggregate.rules.rule import RowRule


class TrimmedMeanOfRows(RowRule):
    """The mean of each coordinate without ``share`` of the vectors, rounded up, at either end, but of one or
    two vectors at least.
    """

    takes_share = True

    def combined(self, columns: Vector) -> Totals:
        return trimmed(columns, self.share)


def trimmed(columns: Vector, share: float) -> Totals:
    """Return the trimmed mean of each row of ``columns``, which are sorted; with 0.5 it is the median."""
    count = columns.shape[1]
    columns.sort(axis=1)
    cut = min(math.ceil(share * count - 1e-9), (count - 1) // 2)
    found: Totals = columns[:, cut : count - cut].mean(axis=1, dtype=np.float64)
    return found
