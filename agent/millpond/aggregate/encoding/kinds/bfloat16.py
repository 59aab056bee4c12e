# SPDX-License-Identifier: Apache-2.0
"""Pure: the upper halves of the values, rounded to nearest, ties to even."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpond.aggregate.encoding.kinds.kind import EncodingKind

if TYPE_CHECKING:
    from millpond.aggregate.encoding.kinds.kind import Bytes, Vector


class Bfloat16(EncodingKind):
    """Half of the bytes. It keeps nothing: with feedback, accuracy was the same."""

    def size(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Vector, data: Bytes) -> Vector:
        import numpy as np

        bits = values.view(np.uint32)
        upper = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        data.view(np.uint16)[:] = upper
        return (upper.astype(np.uint32) << 16).view(np.float32)

    def decode(self, data: Bytes, values: Vector) -> bool:
        import numpy as np

        values.view(np.uint32)[:] = data.view(np.uint16).astype(np.uint32) << 16
        return True
