# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): the coordinate-wise median (Yin et al. 2018, arXiv:1803.01498)."""

from __future__ import annotations

from millpond.aggregate.kernels import Totals, Vector
from millpond.aggregate.rules.rule import RowRule
from millpond.aggregate.rules.trimmed import trimmed


class MedianOfRows(RowRule):
    """The value in the middle of each coordinate, or the mean of the two."""

    def combined(self, columns: Vector) -> Totals:
        return trimmed(columns, 0.5)
