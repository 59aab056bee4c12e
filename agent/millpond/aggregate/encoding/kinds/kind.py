# SPDX-License-Identifier: Apache-2.0
"""Pure: what an encoding says of itself: how its blocks are laid out, and its loops in numpy.

An encoding of one's own is a module beside this one with a class. A kernel ``NAME.c`` beside it has the same
loops in C, with the same bits: see ``kernel.h``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]
    Bytes = NDArray[np.uint8]


class EncodingKind:
    """An encoding, float32 by default; ``share`` is that of the values which are sent, where there is one.

    Its methods import numpy when they are called: an agent with kernels does without.
    """

    block: ClassVar[int] = 1
    """The values of a block, which divides ``layout.MOST_BLOCK``."""
    feeds_back: ClassVar[bool] = False
    """Whether what a vector loses is added to the next one."""
    takes_share: ClassVar[bool] = False

    def __init__(self, share: float = 1.0) -> None:
        self.share = share

    def size(self, count: int) -> int:
        """Return the bytes of a block of ``count`` values, or of several blocks of 1 value."""
        return 4 * count

    def encode(self, values: Vector, data: Bytes) -> Vector:
        """Write a block to ``data``, and leave in ``values`` what that loses if this feeds back. Returns the
        values as they are decoded.
        """
        raise NotImplementedError

    def decode(self, data: Bytes, values: Vector) -> bool:
        """Write the ``values`` of a block. Returns whether ``data`` is valid."""
        raise NotImplementedError
