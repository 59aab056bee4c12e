# SPDX-License-Identifier: Apache-2.0
"""Pure: the k values of largest magnitude of each block, float32; then their positions, ascending uint16."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from millpond.aggregate.encoding.kinds.kind import EncodingKind

if TYPE_CHECKING:
    from millpond.aggregate.encoding.kinds.kind import Bytes, Vector


class TopK(EncodingKind):
    """A ``share`` of the values of each block, one at least. A position in a block takes two bytes."""

    block = 1 << 13
    feeds_back = True
    takes_share = True

    def size(self, count: int) -> int:
        return 6 * min(count, max(1, math.ceil(count * self.share)))

    def encode(self, values: Vector, data: Bytes) -> Vector:
        import numpy as np

        top = len(data) // 6
        order = np.argsort(-np.abs(values), kind="stable")  # of equal magnitudes, the first ones come first
        positions = np.sort(order[:top])
        sent = values[positions]
        data[: 4 * top] = sent.view(np.uint8)
        data[4 * top :] = positions.astype(np.uint16).view(np.uint8)
        values[positions] = 0
        return sent

    def decode(self, data: Bytes, values: Vector) -> bool:
        import numpy as np

        top = len(data) // 6
        positions = data[4 * top :].copy().view(np.uint16).astype(np.int64)
        values[:] = 0
        if (np.diff(positions) <= 0).any() or positions[-1] >= len(values):
            return False
        values[positions] = data[: 4 * top].copy().view(np.float32)
        return True
