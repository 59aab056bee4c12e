# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): a rule by which one range of all vectors becomes a range of the result.

A rule of one's own is a module beside this one with a class: a ``RowRule`` if it needs all values of a
coordinate at once. Such vectors are rows, and ranges are as short as it takes for all rows together to be no
longer than one and a half vectors, down to a block of the encoding in which vectors come. Rows are vectors
over their weights, so that each has one vote.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import ClassVar, Protocol

import numpy as np

from millpond.aggregate.encoding.layout import MOST_BLOCK
from millpond.aggregate.exact import OutOfBounds
from millpond.aggregate.kernels import Totals, Vector

LEAST_RANGE, MOST_RANGE = MOST_BLOCK, 1 << 17  # values
_LEAST_ROW = 1 << 6


class Bounded(Protocol):
    """A vector with its announced bounds, to be scaled by ``factor``, see ``reduction.Addend``."""

    weight: float
    largest: float
    shift: float
    factor: float
    scale: float
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


class CombinationRule:
    """A rule with its ``share``, of which each thread has a computation. Vectors come in blocks of ``block``
    values, a power of two.
    """

    takes_share: ClassVar[bool] = False
    votes: ClassVar[bool] = True
    """Whether each vector counts as much as the others, whatever its weight."""

    def __init__(self, share: float = 0.0, block: int = 1) -> None:
        self.share, self.block = share, block

    def range_values(self, size: int, vectors: int, threads: int, /) -> int:
        """Return the values of one range of so many vectors of ``size`` values, a power of two."""
        raise NotImplementedError

    def computation(self, values: int) -> RangeRule:
        """Return a computation of ranges of up to ``values`` values."""
        raise NotImplementedError


class RowRule(CombinationRule):
    """A rule that needs all values of a coordinate at once."""

    def combined(self, columns: Vector) -> Totals:
        """Return the value of each coordinate, by ``columns`` [coordinates, vectors], which may be changed:
        the same for every order of the vectors.
        """
        raise NotImplementedError

    def range_values(self, size: int, vectors: int, threads: int, /) -> int:
        """Return a power of two, for rows that are together no longer than one and a half vectors."""
        wanted = max(3 * size // (2 * max(vectors * threads, 1)), _LEAST_ROW, self.block)
        return min(1 << (wanted.bit_length() - 1), MOST_RANGE)

    def computation(self, values: int) -> RangeRule:
        return _RowsOfRange(self, values)


class _RowsOfRange:
    def __init__(self, rule: RowRule, values: int) -> None:
        self._rule, self._values = rule, values
        self._memory = np.empty(0, np.float32)
        self._columns, self._filled = self._memory.reshape(0, 0), 0
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
        if self._filled:
            out[:] = self._rule.combined(self._columns[:, : self._filled])
            out += 0.0  # -0 is 0: which of them is in the middle depends on the order


def check_within(values: Vector, bound: float) -> None:
    """Raise OutOfBounds for values beyond ``bound`` as a float32, or if that is infinite."""
    limit = float(np.float32(bound))
    if not max(-float(values.min()), float(values.max())) <= limit < math.inf:  # NaN passes through both
        raise OutOfBounds
