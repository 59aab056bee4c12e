# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): updates as integers modulo 2**64, whose sums have the bits of ``exact``'s sums.

Values are rounded as ``exact`` rounds them, to multiples of ``1 / scale``. Sums of theirs are within 2**53,
so float64 and 64-bit integers have the same ones; integers modulo 2**64 also keep those that are masked.
Behind the values lie the sum of the loss and its count, in units of 2**-20.
"""

from __future__ import annotations

import math

import numpy as np

from millpond.aggregate.exact import ExactSum, OutOfBounds
from millpond.aggregate.kernels import Vector, kernels
from millpond.aggregate.masking.stream import Words

FIGURES = 2
_UNIT, _MOST_FIGURE = 2.0**20, 2.0**32
_BLOCK, _MOST_SUM = 1 << 15, 2.0**52


def quantise(
    values: Vector,
    figures: tuple[float, float],
    out: Words,
    scale: float,
    factor: float,
    bound: float,
    terms: int,
) -> None:
    """Write ``factor`` times ``values``, none beyond ``bound``, and the two figures behind them to ``out``,
    as one of ``terms`` terms of a sum. Raises OutOfBounds for values beyond that, or a sum that overflows.
    """
    if not 0 < scale < math.inf or not scale * bound * factor * terms <= _MOST_SUM:
        raise OutOfBounds
    if not all(abs(figure) <= _MOST_FIGURE for figure in figures):
        raise OutOfBounds
    block = ExactSum(_BLOCK)
    for start in range(0, len(values), _BLOCK):
        part = values[start : start + _BLOCK]
        block.begin(scale)
        block.add(part, factor, bound)
        whole = block.totals(len(part)) * scale
        out[start : start + len(part)] = whole.astype(np.int64).view(np.uint64)
    whole_figures = [math.floor(figure * _UNIT + 0.5) % (1 << 64) for figure in figures]
    out[len(values) :] = np.array(whole_figures, np.uint64)


def divide(words: Words, scale: float, divisor: float, out: Vector) -> tuple[float, float]:
    """Write the sums in ``words`` over ``divisor`` to ``out``. Returns the sums of the two figures."""
    whole = words.view(np.int64)
    for start in range(0, len(out), _BLOCK):
        part = out[start : start + _BLOCK]
        kernels().divide(part, whole[start : start + len(part)] / scale, divisor)
    loss, count = (int(figure) / _UNIT for figure in whole[len(out) :])
    return loss, count
