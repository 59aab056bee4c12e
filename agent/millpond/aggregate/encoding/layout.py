# SPDX-License-Identifier: Apache-2.0
"""Pure: the encodings of a vector, and how many bytes a part of it takes.

A vector is encoded in blocks of its own, the last of which may be shorter, and the blocks follow each other:

| encoding | values of a block | a block of n values |
|---|---|---|
| float32 | 1 | the values |
| bfloat16 | 1 | the upper halves of the values, rounded to nearest, ties to even |
| int8 | 1,024 | a float32 scale, then n multiples of it as whole numbers of 8 bits |
| top-k | 8,192 | the k values of largest magnitude, float32; then their positions, ascending uint16 |

All numbers are little-endian. The length of a part that begins with a block is known before it comes.
Only parameters are encoded: the buffers behind them stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Buffer = bytearray | memoryview
EncodingName = Literal["float32", "bfloat16", "int8", "top-k"]
INT8_VALUES: Final = 1 << 10
TOP_VALUES: Final = 1 << 13
"""Values of a block; a position in it takes two bytes. Ranges of sums are whole blocks of every encoding."""
MOST_SHARE: Final = 0.5
"""A larger share of the values would take almost as many bytes as all of them, or more."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encoding by its ``name``; "top-k" keeps a ``share`` of the values of each block, one at least."""

    name: EncodingName = "float32"
    share: float = 0.01

    @property
    def block(self) -> int:
        """The values of a block."""
        return {"int8": INT8_VALUES, "top-k": TOP_VALUES}.get(self.name, 1)

    @property
    def feeds_back(self) -> bool:
        """Whether what a vector loses is added to the next one."""
        return self.name in ("int8", "top-k")

    def size(self, count: int) -> int:
        """Return the bytes of ``count`` values from the beginning of a block on."""
        if self.name == "int8":
            return count + 4 * -(-count // INT8_VALUES)
        if self.name == "top-k":
            whole, rest = divmod(count, TOP_VALUES)
            return 6 * (whole * self.kept(TOP_VALUES) + self.kept(rest))
        return count * (2 if self.name == "bfloat16" else 4)

    def place(self, stop: int, parameters: int) -> int:
        """Return the bytes of the first ``stop`` values of a vector that begins with so many parameters."""
        return self.size(min(stop, parameters)) + 4 * max(0, stop - parameters)

    def kept(self, count: int) -> int:
        """Return how many of the ``count`` values of a block top-k keeps."""
        return min(count, max(1, math.ceil(count * self.share)))

    def pieces(self, count: int) -> Iterator[tuple[slice, slice]]:
        """Yield the values, and the bytes, of each block among ``count`` values."""
        place = 0
        for start in range(0, count, self.block):
            stop = min(start + self.block, count)
            size = self.size(stop - start)
            yield slice(start, stop), slice(place, place + size)
            place += size


class Bounds(NamedTuple):
    """The bounds of values as they are decoded: the ``largest`` magnitude, and the sum of their ``squares``;
    both NaN if a value is not finite.
    """

    largest: float = 0.0
    squares: float = 0.0

    def joined(self, other: Bounds) -> Bounds:
        """Return the bounds of these values and others."""
        if math.isnan(self.largest + other.largest):
            return NOT_FINITE
        return Bounds(max(self.largest, other.largest), self.squares + other.squares)


NOT_FINITE = Bounds(math.nan, math.nan)


def checked_count(
    encoding: Encoding,
    values: Buffer,
    data: Buffer,
    kept: Buffer | None = None,
    left: Buffer | None = None,
    *,
    decodes: bool = False,
) -> int:
    """Return the number of values. Raises ValueError for buffers of other sizes."""
    count, rest = divmod(len(values), 4)
    feedback = [len(values) if encoding.feeds_back and not decodes else 0] * 2
    if rest or len(data) != encoding.size(count) or [len(kept or b""), len(left or b"")] != feedback:
        raise ValueError(f"buffers are of no sizes for {count} values in {encoding.name}")
    return count
