# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): updates as integers modulo 2**64 or 2**32, whose sums have the bits of those of
``exact``.

Values are rounded as ``exact`` rounds them, to multiples of ``1 / scale``: a value plus ``shift_of(scale)``
is a float64 whose last bit is worth ``1 / scale``, so its bits less those of the shift are the whole number.
Sums of theirs are within half of the modulus, so the sums of the integers are those of the values, and those
of masked integers, too. Two figures beside the values, the sum of the loss and its count, are in units of
2**-20, modulo 2**64.

*Error.* With 64 bits it is ``exact``'s. With 32 bits, the unit of ``terms`` values up to ``largest`` is at
most ``terms * largest * 2**-29``, and each value is rounded by half of that.

*Width.* 32 bits are enough where they move no value of the mean by more than MOST_ERROR: float32 rounds a
parameter between 0.5 and 1 by as much. The error follows from public numbers alone, before anything is added.
"""

from __future__ import annotations

import math

import numpy as np

from millpond.aggregate.exact import BITS, OutOfBounds, scale_of, shift_of
from millpond.aggregate.kernels import LARGEST, Vector, Words, kernels
from millpond.aggregate.masking.messages import SumBits
from millpond.aggregate.masking.stream import MaskedVector

_UNIT, _MOST_FIGURE = 2.0**20, 2.0**32
_MOST_OVER = 1.001
"""Norms, by which values are scaled down to the clip, are rounded."""


MOST_ERROR = 2.0**-25


def width_of(wanted: SumBits, largest: float, terms: int, divisor: float) -> int:
    """Return the ``wanted`` width, "auto" as by the module's derivation, of the words of ``terms`` values up
    to ``largest`` whose mean is their sum over ``divisor``.
    """
    if wanted != "auto":
        return wanted
    error = terms / scale_of(largest, terms, bits_of_sum(32)) / 2
    return 32 if error <= MOST_ERROR * divisor else 64


def bits_of_sum(bits: int) -> int:
    """Return the bits of the largest sum of values of so many bits: terms are rounded, which adds to it."""
    return BITS if bits == 64 else bits - 2


class Quantiser:
    """Rounds ``factor`` times values, none beyond ``bound``, as one of ``terms`` terms of a sum of words of
    so many ``bits``. Raises OutOfBounds if the sum could overflow.
    """

    def __init__(self, bits: int, scale: float, factor: float, bound: float, terms: int) -> None:
        most = _MOST_OVER * 2.0 ** bits_of_sum(bits)
        if not 0 < scale < math.inf or not scale * bound * factor * terms <= most:
            raise OutOfBounds
        self._bound, self._shift = min(float(np.float32(bound)), LARGEST), shift_of(scale)
        self._factor = factor

    def write(self, values: Vector, words: Words) -> None:
        """Write values to ``words``. Raises OutOfBounds for one beyond the bound."""
        if not kernels().round_values(words, values, self._factor, self._shift, self._bound):
            raise OutOfBounds


def whole_figure(figure: float) -> int:
    """Return a figure as a whole number, modulo 2**64. Raises OutOfBounds for one that no sum can have."""
    if not abs(figure) <= _MOST_FIGURE:
        raise OutOfBounds
    return math.floor(figure * _UNIT + 0.5) % (1 << 64)


def divide(words: MaskedVector, scale: float, divisor: float, out: Vector) -> tuple[float, float]:
    """Write the sums in ``words`` over ``divisor`` to ``out``. Returns the sums of the two figures."""
    kernels().divide_words(out, words.values, 1 / scale, divisor)
    loss, count = (int(figure) / _UNIT for figure in words.figures.view(np.int64))
    return loss, count
