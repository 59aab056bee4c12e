# SPDX-License-Identifier: Apache-2.0
"""Pure: memory for replies, used again once no view of it is left: a reply that was returned is on its way to
a program for a while.
"""

from __future__ import annotations

import sys

from millpond.fs.vfs.path_api import MAX_TRANSFER

_UNSHARED = sys.getrefcount(bytearray()) + 1  # references to a buffer in a list of which there is no view


class ReplyBuffers:
    """Buffers of MAX_TRANSFER bytes, of which at most ``spare`` unused ones are kept. One thread may call at
    once.
    """

    def __init__(self, spare: int) -> None:
        self._spare = spare
        self._all: list[bytearray] = []

    def take(self, size: int) -> memoryview:
        """Return a view of ``size`` bytes, at most MAX_TRANSFER."""
        free = [n for n in range(len(self._all)) if sys.getrefcount(self._all[n]) <= _UNSHARED]
        if not free:
            self._all.append(bytearray(MAX_TRANSFER))
        chosen = self._all[free[0] if free else -1]
        for surplus in reversed(free[1 + self._spare :]):
            del self._all[surplus]
        return memoryview(chosen)[:size]
