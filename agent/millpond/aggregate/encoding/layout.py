# SPDX-License-Identifier: Apache-2.0
"""Pure: the encodings of a vector, and how many bytes a part of it takes.

A vector is encoded in blocks of its own, the last of which may be shorter, and the blocks follow each other.
All numbers are little-endian. The length of a part that begins with a block is known before it comes. Only
parameters are encoded: the buffers behind them stay as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from millpond.aggregate.encoding import kinds
from millpond.aggregate.encoding.kinds.kind import EncodingKind
from millpond.base.errors import ConfigError
from millpond.base.one_class import class_in, names_in

Buffer = bytearray | memoryview
PLAIN: Final = "float32"
ENCODINGS: Final = (PLAIN, *(name.replace("_", "-") for name in names_in(kinds, ("kind",))))
MOST_BLOCK: Final = 1 << 13
"""Whole blocks of every encoding, as the ranges of sums are."""
MOST_SHARE: Final = 0.5
"""A larger share of the values would take almost as many bytes as all of them, or more."""


@functools.lru_cache(64)
def _kind_of(name: str, share: float) -> EncodingKind:
    made = EncodingKind if name == PLAIN else class_in(kinds, name.replace("-", "_"), EncodingKind)
    return made(share)


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encoding by its ``name``; some send a ``share`` of the values of each block."""

    name: str = PLAIN
    share: float = 0.01

    def __post_init__(self) -> None:
        if self.name not in ENCODINGS:
            raise ConfigError(f"name: {self.name!r:.40} is not one of {', '.join(ENCODINGS)}")

    @property
    def kind(self) -> EncodingKind:
        """The encoding's class, with its layout and its loops."""
        return _kind_of(self.name, self.share)

    @property
    def block(self) -> int:
        """The values of a block."""
        return self.kind.block

    @property
    def feeds_back(self) -> bool:
        """Whether what a vector loses is added to the next one."""
        return self.kind.feeds_back

    def size(self, count: int) -> int:
        """Return the bytes of ``count`` values from the beginning of a block on."""
        kind = self.kind
        whole, rest = divmod(count, kind.block)
        return whole * kind.size(kind.block) + (kind.size(rest) if rest else 0)

    def place(self, stop: int, parameters: int) -> int:
        """Return the bytes of the first ``stop`` values of a vector that begins with so many parameters."""
        return self.size(min(stop, parameters)) + 4 * max(0, stop - parameters)

    def pieces(self, count: int) -> Iterator[tuple[slice, slice]]:
        """Yield the values, and the bytes, of each block among ``count`` values; blocks of 1 all at once."""
        step, place = self.block if self.block > 1 else max(count, 1), 0
        for start in range(0, count, step):
            stop = min(start + step, count)
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
    encoding: Encoding, values: Buffer, data: Buffer, feedback: Sequence[Buffer] | None = None
) -> int:
    """Return the number of values. Raises ValueError for buffers of other sizes."""
    count, rest = divmod(len(values), 4)
    wanted = [len(values)] * (2 * encoding.feeds_back)
    fits = feedback is None or [len(each) for each in feedback] == wanted
    if rest or len(data) != encoding.size(count) or not fits:
        raise ValueError(f"buffers are of no sizes for {count} values in {encoding.name}")
    return count
