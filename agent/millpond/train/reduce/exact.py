# SPDX-License-Identifier: Apache-2.0
"""Pure: sums of vectors whose bits depend neither on the order of addition nor on its grouping.

Floating-point addition depends on its order, so values are rounded to whole multiples of ``2**-S`` first, and
added as float64, which adds whole numbers exactly up to ``2**53``.

*No overflow.* ``terms`` vectors are added whose values are within ``largest``, and ``S`` is a whole number
with ``2**50 <= terms * largest * 2**S <= 2**51``. A sum of rounded values is then at most
``2**51 + terms / 2``.

*Rounding.* Numbers from ``2**(52-S)`` to ``2**(53-S)`` are 2**-S apart as float64. A value plus
``3 * 2**(51-S)`` is one of them, as it is within ``2**(51-S)`` itself; the difference from that number is the
value rounded to a multiple of ``2**-S``, ties to even.

*Error.* A value is rounded by at most ``2**-(S+1)``, which is at most ``terms * largest * 2**-51``. So a
sum of 1,000 vectors is off by less than 5e-10 of the largest value, whatever the number of samples in it; the
final rounding to float32 comes on top, as it does for any method, and is 3e-8 of the value itself.

Memory: 8 bytes per value of the range that is being summed, and a scratch that a processor's cache holds.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from millpond.base.errors import RemoteError

_LARGEST = float(np.finfo(np.float32).max)
_BITS = 51
_BLOCK = 1 << 15
_MOST_BITS = 900
"""No float32 needs more, and with more than 1023 the scale would overflow."""
_SMALLEST_SQUARED = 1e-15
"""The smallest bound whose square is a normal float32."""
Vector = NDArray[np.float32]


class RefusedUpdate(RemoteError):
    """A worker's update does not count; names the ``worker`` and the fault."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(f"{worker}: update refused: {text}")
        self.worker = worker


class ExactSum:
    """A sum of float32 vectors of up to ``size`` values, to be used for one range after the other."""

    def __init__(self, size: int) -> None:
        self._total, self._scratch = np.zeros(size), np.empty(min(size, _BLOCK))
        self._shift = 0.0

    def begin(self, scale: float) -> None:
        """Begin a new sum, of multiples of ``1 / scale``; see ``scale_of``."""
        self._total[:] = 0.0
        self._shift = 3 * 2.0**51 / scale

    def add(self, vector: Vector, factor: float = 1.0) -> None:
        """Add ``factor`` times a vector."""
        for start in range(0, len(vector), _BLOCK):
            block = vector[start : start + _BLOCK]
            rounded = self._scratch[: len(block)]
            rounded[:] = block
            if factor != 1.0:
                rounded *= factor
            rounded += self._shift
            rounded -= self._shift
            self._total[start : start + len(block)] += rounded

    def divide(self, divisor: float, out: Vector) -> None:
        """Write the sum over ``divisor`` to ``out``, which is as long as the added vectors."""
        for start in range(0, len(out), _BLOCK):
            block = out[start : start + _BLOCK]
            found = self._scratch[: len(block)]
            np.divide(self._total[start : start + len(block)], divisor, out=found)
            block[:] = found


def scale_of(largest: float, terms: int) -> float:
    """Return ``2**S`` of the module's derivation for ``terms`` vectors with values up to ``largest``."""
    if not largest:
        return 1.0
    return math.ldexp(1.0, min(_BITS - math.frexp(largest * terms)[1], _MOST_BITS))


def within(values: Vector, bound: float) -> bool:
    """Return whether all values are finite and none exceeds ``bound`` as a float32."""
    bound = float(np.float32(bound))
    with np.errstate(over="ignore", invalid="ignore"):
        # One look at memory, where min and max take two. Rounding never makes a sum of squares smaller than
        # the rounded square of one of them, so none beyond the bound passes.
        square = float(np.dot(values, values))
    if bound >= _SMALLEST_SQUARED and square < bound * bound:
        return True
    return bool(
        max(-values.min(), values.max()) <= min(bound, _LARGEST)
    )  # false for NaN, which min and max pass on
