# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): the exact mean of vectors by their weights, to which each is added as it comes.

Changes of buffers may be of any size. Those of vectors that are ``even`` are added as parameters are, in one
unit, as reduction nodes do, to the same bits. The mean of others is of sorted rows: no unit of a sum rounds
small ones beyond the values that they lead to, and large ones cost parameters no digit.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from millpond.aggregate.exact import ExactSum, scale_of
from millpond.aggregate.kernels import Totals, Vector
from millpond.aggregate.rules.rule import (
    LEAST_RANGE,
    MOST_RANGE,
    Bounded,
    CombinationRule,
    RangeRule,
    check_within,
)

_RANGES = 16
"""A vector has as many ranges, so that their sums need little beside it, unless they would be too small."""


class ExactMean(CombinationRule):
    """The sum of the vectors over the sum of their weights."""

    votes = False

    def range_values(self, size: int, _vectors: int = 0, _threads: int = 0, /) -> int:
        """Return the values of a range, whatever number of vectors there is."""
        return min(max(1 << (size // _RANGES).bit_length(), LEAST_RANGE), MOST_RANGE)

    def computation(self, values: int) -> RangeRule:
        return _MeanOfRange(values)


class _MeanOfRange:
    def __init__(self, values: int) -> None:
        self._total, self._weight = ExactSum(values), 0.0
        self._parameters, self._rows, self._even = values, SortedSum(), False

    def begin(self, vectors: Collection[Bounded], _count: int, parameters: int, /) -> None:
        self._even = all(each.even for each in vectors)
        largest = max((self._bound(each) * each.factor for each in vectors), default=0.0)
        scale = min((each.scale for each in vectors), default=math.inf)
        self._total.begin(min(scale, scale_of(largest, len(vectors))))
        self._weight = sum(each.weight for each in vectors)
        self._parameters, self._rows = parameters, SortedSum()

    def add(self, vector: Bounded, values: Vector, apart: Totals | None = None, /) -> None:
        own, others = values[: self._parameters], values[self._parameters :]
        if len(others):
            check_within(others, vector.shift)
        if self._even and len(own) and len(others):
            check_within(own, vector.largest)
            self._total.add(values, vector.factor, self._bound(vector))
        elif self._even:
            self._total.add(values, vector.factor, vector.largest if len(own) else vector.shift)
        else:
            self._add_apart(vector, own, others, apart)

    def _add_apart(self, vector: Bounded, own: Vector, others: Vector, apart: Totals | None) -> None:
        if len(own):
            self._total.add(own, vector.factor, vector.largest)
        if len(others):
            self._rows.add(others if apart is None else others + apart, vector.factor)

    def _bound(self, vector: Bounded) -> float:
        """Return the largest value of a vector that is added in one unit."""
        return max(vector.largest, vector.shift) if self._even else vector.largest

    def finish(self, out: Vector) -> None:
        if self._even:
            self._total.divide(self._weight or 1.0, out)
            return
        own = out[: self._parameters]
        if len(own):
            self._total.divide(self._weight or 1.0, own)
        self._rows.divide(self._weight or 1.0, out[self._parameters :])


MEAN = ExactMean()


class SortedSum:
    """A sum of vectors of any size, with the same bits for every order of them."""

    def __init__(self) -> None:
        self._rows: list[Totals] = []

    def add(self, vector: Vector | Totals, factor: float) -> None:
        """Add ``factor`` times a vector."""
        self._rows.append(vector.astype(np.float64) * factor)

    def divide(self, divisor: float, out: Vector) -> None:
        """Write the sum over ``divisor``, as long as the vectors, to ``out``."""
        if self._rows:
            out[:] = np.sort(np.stack(self._rows), axis=0).sum(axis=0) / divisor
