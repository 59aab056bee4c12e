# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): the sums of masked words, modulo a power of two. Vectors are words seen as
float32, which have no bounds: nobody knows what is behind their masks.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from millpond.aggregate.kernels import Totals, Vector
from millpond.aggregate.masking.words import words_of
from millpond.aggregate.rules.mean import MEAN
from millpond.aggregate.rules.rule import Bounded, CombinationRule, RangeRule


class WordSums(CombinationRule):
    """The sums of vectors of words of so many ``bits``."""

    votes = False

    def __init__(self, bits: int) -> None:
        super().__init__(block=bits // 32)
        self._bits = bits

    def range_values(self, size: int, vectors: int = 0, threads: int = 0, /) -> int:
        """Return the float32 of a range."""
        return MEAN.range_values(size, vectors, threads)

    def computation(self, values: int) -> RangeRule:
        return _SumsOfRange(self._bits, values)


class _SumsOfRange:
    def __init__(self, bits: int, values: int) -> None:
        self._kind, self._totals = words_of(bits), np.zeros(4 * values, np.uint8)
        self._count = 0

    def begin(self, _vectors: Collection[Bounded], count: int, _parameters: int, /) -> None:
        self._count = count
        self._totals[: 4 * count] = 0

    def add(self, _vector: Bounded, values: Vector, _apart: Totals | None = None, /) -> None:
        totals = self._totals[: values.nbytes].view(self._kind)
        np.add(totals, values.view(self._kind), out=totals)

    def finish(self, out: Vector) -> None:
        out[:] = self._totals[: out.nbytes].view(np.float32)
