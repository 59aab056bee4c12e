# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): sums of vectors whose bits depend on no order of addition and no grouping.

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

Memory: 8 bytes per value of the range that is being summed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import numpy as np

from millpond.aggregate.kernels import LARGEST, Kernels, Totals, Vector, kernels
from millpond.base.errors import RemoteError

_SMALLEST, _MEAN_ERROR = float(np.finfo(np.float32).smallest_subnormal), 1e-6
"""The greatest error that rounding adds to a mean; the second is a share of the mean."""
BITS = 51
"""Of the largest sum."""
_MOST_BITS = 900
"""No float32 needs more, and with more than 1023 the scale would overflow."""


class RefusedUpdate(RemoteError):
    """A worker's update does not count; names the ``worker`` and the fault."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(f"{worker}: update refused: {text}")
        self.worker = worker


class OutOfBounds(ValueError):
    """A value is not finite, or beyond the bound that was announced; the sum is of no use."""


@contextlib.contextmanager
def refusing(worker: str, text: str = "its values are beyond those it has announced") -> Iterator[None]:
    """Refuse a worker's update, with this fault, whose values are out of bounds."""
    try:
        yield
    except OutOfBounds:
        raise RefusedUpdate(worker, text) from None


class ExactSum:
    """A sum of float32 vectors of up to ``size`` values, to be used for one range after the other."""

    def __init__(self, size: int, using: Kernels | None = None) -> None:
        self._totals, self._kernels = np.zeros(size), using or kernels()
        self._shift = self._bound = 0.0

    def begin(self, scale: float) -> None:
        """Begin a new sum, of multiples of ``1 / scale``; see ``scale_of``."""
        self._totals[:] = 0.0
        self._shift, self._bound = shift_of(scale), 2.0**BITS / scale

    def add(self, vector: Vector, factor: float = 1.0, bound: float = LARGEST) -> None:
        """Add ``factor`` times a vector. Raises OutOfBounds for values beyond ``bound`` as a float32."""
        bound = min(float(np.float32(bound)), LARGEST)
        if not self._kernels.add_rounded(self._totals[: len(vector)], vector, factor, self._shift, bound):
            raise OutOfBounds

    def merge(self, totals: Totals) -> None:
        """Add the totals of other vectors at the same scale. Raises OutOfBounds if they can be none."""
        if not self._kernels.add_totals(self._totals[: len(totals)], totals, self._shift, self._bound):
            raise OutOfBounds

    def totals(self, count: int) -> Totals:
        """Return the first ``count`` sums, which the next ``begin`` overwrites."""
        return self._totals[:count]

    def divide(self, divisor: float, out: Vector) -> None:
        """Write the sum over ``divisor`` to ``out``, which is as long as the added vectors."""
        self._kernels.divide(out, self._totals[: len(out)], divisor)


def scale_of(largest: float, terms: int, bits: int = BITS) -> float:
    """Return ``2**S`` of the module's derivation for ``terms`` vectors with values up to ``largest``, whose
    sums have up to so many ``bits``.
    """
    if not largest:
        return 1.0
    return math.ldexp(1.0, min(bits - math.frexp(largest * terms)[1], _MOST_BITS))


def shift_of(scale: float) -> float:
    """Return the number whose addition and subtraction round a value to a multiple of ``1 / scale``."""
    return 3 * 2.0**BITS / scale


def most_of_mean(bounds: Iterable[tuple[float, float]], divisor: float) -> float:
    """Return the bound of a mean, as float32, of vectors with the bounds (factor, largest value)."""
    most = sum(factor * largest for factor, largest in bounds) / divisor
    return most * (1 + _MEAN_ERROR) + _SMALLEST


def check_within(values: Vector, bound: float) -> None:
    """Raise OutOfBounds if any of the values, of which there are some, is beyond ``bound``, or NaN."""
    if not (-bound <= values.min() and values.max() <= bound):
        raise OutOfBounds


def all_finite(values: Vector) -> bool:
    """Return whether all values, of which there are some, are finite."""
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))  # NaN passes through both
