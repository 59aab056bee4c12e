# SPDX-License-Identifier: Apache-2.0
"""Pure: blocks of a float32 scale, then multiples of it as whole numbers of 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpond.aggregate.encoding.kinds.kind import EncodingKind

if TYPE_CHECKING:
    from millpond.aggregate.encoding.kinds.kind import Bytes, Vector

_SMALLEST = 2.0**-100
"""A block below it is all zeros: the quotients of smaller numbers are too coarse."""


class Int8(EncodingKind):
    """A quarter of the bytes."""

    block = 1 << 10
    feeds_back = True

    def size(self, count: int) -> int:
        return 4 + count

    def encode(self, values: Vector, data: Bytes) -> Vector:
        import numpy as np

        largest = np.abs(values).max(keepdims=True)
        scale = np.where(largest < np.float32(_SMALLEST), np.float32(0), largest / np.float32(127))
        numbers = np.rint(values / np.where(scale > 0, scale, np.float32(1)))
        data[:4] = scale.view(np.uint8)
        data[4:] = numbers.astype(np.int8).view(np.uint8)
        decoded: Vector = (numbers + np.float32(0)) * scale  # no zero is negative
        values -= decoded
        return decoded

    def decode(self, data: Bytes, values: Vector) -> bool:
        import numpy as np

        scale = data[:4].copy().view(np.float32)
        if not np.isfinite(scale).all() or np.signbit(scale).any():
            return False
        with np.errstate(over="ignore"):
            np.multiply(data[4:].view(np.int8).astype(np.float32), scale, out=values)
        return True
