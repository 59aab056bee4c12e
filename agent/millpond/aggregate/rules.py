# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): the rules by which one range of all vectors becomes a range of the result.

The exact mean adds each vector as it comes. A trimmed mean, of which the median is the extreme, needs all
values of a coordinate at once: the vectors are rows, and ranges are as short as it takes for all rows
together to be no longer than one and a half vectors, down to a block of the encoding in which vectors come.

Rows are vectors over their weights, so that each has one vote. Sorted values are summed: the result has the
same bits for every order of the vectors.

Changes of buffers may be of any size. Those of vectors that are ``even`` are added as parameters are, in one
unit, as reduction nodes do, to the same bits. The mean of others is of sorted rows, too: no unit of a sum
rounds small ones beyond the values that they lead to, and large ones cost parameters no digit.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

import numpy as np

from millpond.aggregate.exact import ExactSum, OutOfBounds, scale_of
from millpond.aggregate.kernels import Totals, Vector

LEAST_RANGE, MOST_RANGE = 1 << 13, 1 << 17  # values; whole blocks of every encoding
_RANGES = 16
"""A vector has as many ranges, so that their sums need little beside it, unless they would be too small."""
_LEAST_ROW = 1 << 6


class Bounded(Protocol):
    """A vector with its announced bounds, to be scaled by ``factor``, see ``reduction.Addend``."""

    weight: float
    largest: float
    shift: float
    factor: float
    even: bool


class RangeRule(Protocol):
    """The computation of one range after the other, by one thread."""

    def begin(self, vectors: Collection[Bounded], count: int, parameters: int, /) -> None:
        """Begin a range of ``count`` values of these vectors, whose weights are not all 0. The first ones are
        of ``parameters``, the others of buffers.
        """

    def add(self, vector: Bounded, values: Vector, apart: Totals | None = None, /) -> None:
        """Add the values of a vector in this range, and what is to be added to those of buffers. Raises
        OutOfBounds for others than it has announced.
        """

    def finish(self, out: Vector) -> None:
        """Write the result of the vectors that were added."""


class CombinationRule(Protocol):
    """A rule, of which each thread has a computation."""

    def range_values(self, size: int, vectors: int, threads: int, /) -> int:
        """Return the values of one range of so many vectors of ``size`` values."""

    def computation(self, values: int) -> RangeRule:
        """Return a computation of ranges of up to ``values`` values."""


class ExactMean:
    """The sum of the vectors over the sum of their weights."""

    def range_values(self, size: int, _vectors: int = 0, _threads: int = 0, /) -> int:
        """See CombinationRule: a power of two."""
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
        self._total.begin(scale_of(largest, len(vectors)))
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


def check_within(values: Vector, bound: float) -> None:
    """Raise OutOfBounds for values beyond ``bound`` as a float32, or if that is infinite."""
    limit = float(np.float32(bound))
    if not max(-float(values.min()), float(values.max())) <= limit < math.inf:  # NaN passes through both
        raise OutOfBounds


class TrimmedMeanOfRows:
    """The mean of each coordinate without ``share`` of the vectors, rounded up, at either end, but of one or
    two vectors at least: with 0.5 the median. The vectors come in blocks of ``block`` values, a power of two.
    """

    def __init__(self, share: float, block: int = 1) -> None:
        self._share, self._block = share, block

    def range_values(self, size: int, vectors: int, threads: int, /) -> int:
        """See CombinationRule: a power of two, for rows that are together no longer than that."""
        wanted = max(3 * size // (2 * max(vectors * threads, 1)), _LEAST_ROW, self._block)
        return min(1 << (wanted.bit_length() - 1), MOST_RANGE)

    def computation(self, values: int) -> RangeRule:
        return _TrimmedRange(self._share, values)


class _TrimmedRange:
    def __init__(self, share: float, values: int) -> None:
        self._share, self._values = share, values
        self._memory = np.empty(0, np.float32)
        self._columns, self._filled = self._memory.reshape(0, 0), 0  # a coordinate's values in a row
        self._parameters = values

    def begin(self, vectors: Collection[Bounded], count: int, parameters: int, /) -> None:
        if len(self._memory) < self._values * len(vectors):
            self._memory = np.empty(self._values * len(vectors), np.float32)
        self._columns = self._memory[: count * len(vectors)].reshape(count, len(vectors))
        self._filled, self._parameters = 0, parameters

    def add(self, vector: Bounded, values: Vector, _apart: Totals | None = None, /) -> None:
        cut = self._parameters
        for part, bound in ((values[:cut], vector.largest), (values[cut:], vector.shift)):
            if len(part):
                check_within(part, bound)
        np.multiply(values, vector.factor / vector.weight, out=self._columns[:, self._filled])
        self._filled += 1

    def finish(self, out: Vector) -> None:
        found = self._columns[:, : self._filled]
        if not self._filled:
            return
        found.sort(axis=1)
        cut = min(math.ceil(self._share * self._filled - 1e-9), (self._filled - 1) // 2)
        kept = found[:, cut : self._filled - cut]
        out[:] = kept.mean(axis=1, dtype=np.float64)
        out += 0.0  # -0 is 0: which of them is in the middle depends on the order


def rule_of(rule: str, share: float, block: int = 1) -> CombinationRule | None:
    """Return a rule by its name, None for the exact mean."""
    if rule == "mean":
        return None
    return TrimmedMeanOfRows(0.5 if rule == "median" else share, block)
