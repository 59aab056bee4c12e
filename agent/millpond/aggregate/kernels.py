# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): the loops over vectors, in C where a compiler built them, else in numpy.

Both give the same bits. The C loops look at memory once where numpy does several times, and run without the
interpreter's lock, so threads run them side by side.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millpond.base import shared_library

LIBRARY = Path(__file__).with_name("_kernels.so")
_VERSION = 3
_LANES = 8
LARGEST = float(np.finfo(np.float32).max)
"""The largest finite float32."""
_BLOCK = 1 << 15  # of values, whose float64 copy stays in a processor's cache

Vector = NDArray[np.float32]
Totals = NDArray[np.float64]
Words = NDArray[np.uint64] | NDArray[np.uint32]


class Kernels(Protocol):
    """The loops. All vectors of a call are of one length, contiguous, and do not overlap."""

    def add_rounded(self, totals: Totals, values: Vector, factor: float, shift: float, bound: float) -> bool:
        """Add ``factor`` times ``values``, rounded by ``shift``, to ``totals``. Returns whether all
        values are finite, and within ``bound``, a float32; ``totals`` are of no use otherwise.
        """

    def squares(self, values: Vector) -> float:
        """Return the sum of the squares of ``values``."""

    def add_totals(self, totals: Totals, others: Totals, shift: float, bound: float) -> bool:
        """Add other totals of the same ``shift``. Returns whether all are multiples of its unit within
        ``bound``; ``totals`` are of no use otherwise.
        """

    def divide(self, means: Vector, totals: Totals, divisor: float) -> None:
        """Write ``totals`` over ``divisor`` to ``means``."""

    def round_values(self, words: Words, values: Vector, factor: float, shift: float, bound: float) -> bool:
        """Write ``factor`` times ``values``, rounded by ``shift``, to ``words``, in units of the last bit of
        ``shift`` and modulo what words hold. Returns whether all values are finite, and within ``bound``, a
        float32; ``words`` are of no use otherwise.
        """

    def divide_words(self, means: Vector, words: Words, unit: float, divisor: float) -> None:
        """Write whole numbers, as ``words`` hold them with a sign, in this unit and over ``divisor`` to
        ``means``.
        """


class NativeKernels:
    """The loops in C. Raises LocalError without the library."""

    def __init__(self) -> None:
        library = shared_library.load(LIBRARY, _VERSION)
        pointer, size, real = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double
        self._add_rounded, self._add_totals = library.add_rounded, library.add_totals
        self._add_rounded.argtypes = (pointer, pointer, size, real, real, ctypes.c_float)
        self._squares = library.squares
        self._squares.argtypes, self._squares.restype = (pointer, size), real
        self._add_totals.argtypes = (pointer, pointer, size, real, real)
        self._round_values = library.round_values
        self._round_values.argtypes = (pointer, pointer, size, ctypes.c_int, real, real, ctypes.c_float)
        self._divide_words = library.divide_words
        self._divide_words.argtypes = (pointer, pointer, size, ctypes.c_int, real, real)
        self._divide_words.restype = None
        self._divide = library.divide
        self._divide.argtypes, self._divide.restype = (pointer, pointer, size, real), None

    def add_rounded(self, totals: Totals, values: Vector, factor: float, shift: float, bound: float) -> bool:
        return not self._add_rounded(*_addresses(totals, values), len(totals), factor, shift, bound)

    def squares(self, values: Vector) -> float:
        return float(self._squares(_addresses(values, values)[0], len(values)))

    def add_totals(self, totals: Totals, others: Totals, shift: float, bound: float) -> bool:
        return not self._add_totals(*_addresses(totals, others), len(totals), shift, bound)

    def divide(self, means: Vector, totals: Totals, divisor: float) -> None:
        self._divide(*_addresses(means, totals), len(means), divisor)

    def round_values(self, words: Words, values: Vector, factor: float, shift: float, bound: float) -> bool:
        wide = int(words.itemsize == 8)
        addresses = _addresses(words, values)
        return not self._round_values(*addresses, len(words), wide, factor, shift, bound)

    def divide_words(self, means: Vector, words: Words, unit: float, divisor: float) -> None:
        wide = int(words.itemsize == 8)
        self._divide_words(*_addresses(means, words), len(words), wide, unit, divisor)


class NumpyKernels:
    """The loops in numpy."""

    def add_rounded(self, totals: Totals, values: Vector, factor: float, shift: float, bound: float) -> bool:
        for start in range(0, len(values), _BLOCK):
            block = values[start : start + _BLOCK].astype(np.float64)
            with np.errstate(invalid="ignore"):
                if not max(-block.min(), block.max()) <= min(
                    bound, LARGEST
                ):  # true for NaN, which min and max pass on
                    return False
            block *= factor
            block += shift
            block -= shift
            totals[start : start + len(block)] += block
        return True

    def squares(self, values: Vector) -> float:
        lanes = np.zeros(_LANES)
        for start in range(0, len(values), _BLOCK):
            block = values[start : start + _BLOCK].astype(np.float64)
            found = np.zeros(-(-len(block) // _LANES) * _LANES)
            np.multiply(block, block, out=found[: len(block)])
            lanes = np.vstack((lanes, found.reshape(-1, _LANES))).sum(axis=0)
        return float(functools.reduce(float.__add__, lanes.tolist(), 0.0))

    def add_totals(self, totals: Totals, others: Totals, shift: float, bound: float) -> bool:
        with np.errstate(invalid="ignore", over="ignore"):
            exact = (np.abs(others) <= bound) & ((others + shift) - shift == others)
        totals += others
        return bool(exact.all())

    def divide(self, means: Vector, totals: Totals, divisor: float) -> None:
        np.divide(totals, divisor, out=means, casting="same_kind")

    def round_values(self, words: Words, values: Vector, factor: float, shift: float, bound: float) -> bool:
        zero = np.array([shift]).view(np.uint64)
        for start in range(0, len(values), _BLOCK):
            part = values[start : start + _BLOCK]
            if not max(-part.min(), part.max()) <= min(bound, LARGEST):
                return False
            block = part.astype(np.float64)
            block *= factor
            block += shift
            words[start : start + len(part)] = block.view(np.uint64) - zero
        return True

    def divide_words(self, means: Vector, words: Words, unit: float, divisor: float) -> None:
        signed = words.view(np.int64) if words.itemsize == 8 else words.view(np.int32)
        for start in range(0, len(words), _BLOCK):
            totals = np.multiply(signed[start : start + _BLOCK], unit, dtype=np.float64)
            np.divide(totals, divisor, out=means[start : start + _BLOCK], casting="same_kind")


def _addresses(first: Vector | Totals | Words, second: Vector | Totals | Words) -> tuple[int, int]:
    if len(first) != len(second) or not (first.flags.c_contiguous and second.flags.c_contiguous):
        raise ValueError("vectors of one length, contiguous, are added")
    return first.ctypes.data, second.ctypes.data


@functools.cache
def kernels() -> Kernels:
    """Return the C loops where they are built and load, else those of numpy."""
    return NativeKernels() if shared_library.is_usable(LIBRARY, _VERSION) else NumpyKernels()
