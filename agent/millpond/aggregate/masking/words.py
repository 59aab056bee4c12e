# SPDX-License-Identifier: Apache-2.0
"""Pure: updates as vectors of words, whole numbers modulo 2**64 or 2**32, which devices and the host add."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from millpond.base.errors import ProtocolError

FIGURE_BYTES: Final = 16
PART_BYTES: Final = 1 << 18
"""The bytes of a part, which stays in the cache of a core."""


def words_of(bits: int) -> type[np.uint32] | type[np.uint64]:
    """Return the type of words of so many bits."""
    return np.uint32 if bits == 32 else np.uint64


def sum_of_figures(figures: Iterable[bytes]) -> bytes:
    """Return the sums of vectors' figures. Raises ProtocolError for what are none."""
    total = np.zeros(2, np.uint64)
    for each in figures:
        if len(each) != FIGURE_BYTES:
            raise ProtocolError("a masked update has two figures")
        total += np.frombuffer(each, np.uint64)
    return total.tobytes()


class WordVector:
    """Two ``figures``, modulo 2**64, and ``values`` [size] modulo 2**bits behind them, in one memory: that of
    ``data``, which may be longer, or else its own, which begins with zeros.
    """

    def __init__(self, size: int, bits: int, data: memoryview | None = None) -> None:
        length = self.bytes_of(size, bits)
        self.data = np.zeros(length, np.uint8) if data is None else np.frombuffer(data, np.uint8, length)
        self.figures: NDArray[np.uint64] = self.data[:FIGURE_BYTES].view(np.uint64)
        values = self.data[FIGURE_BYTES:]
        self.values: NDArray[np.uint64] | NDArray[np.uint32] = (
            values.view(np.uint32) if bits == 32 else values.view(np.uint64)
        )

    @staticmethod
    def bytes_of(size: int, bits: int) -> int:
        """Return the bytes of such a vector."""
        return FIGURE_BYTES + size * bits // 8

    def add(self, other: WordVector) -> None:
        """Add another vector of the same size."""
        self.figures += other.figures
        self.values += other.values

    def parts(self) -> Iterator[slice]:
        """Yield the places of the values in parts of at most PART_BYTES."""
        step = PART_BYTES // self.values.itemsize
        return (slice(start, start + step) for start in range(0, len(self.values), step))
