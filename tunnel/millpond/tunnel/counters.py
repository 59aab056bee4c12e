"""Edge: packet counters that a pump keeps in memory shared with its end's main process."""

from __future__ import annotations

import mmap
from typing import NamedTuple

_PACKETS, _BYTES, _DROPPED = range(3)


class Counts(NamedTuple):
    """What moved in one direction, headers included, and the packets that the kernel refused."""

    packets: int
    bytes: int
    dropped: int


class Counters:
    """One direction's counters; make them before the pump is forked. One writer."""

    def __init__(self) -> None:
        self._values = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")

    def count(self, size: int) -> None:
        """A packet of ``size`` bytes went through."""
        values = self._values
        values[_PACKETS] += 1
        values[_BYTES] += size

    def drop(self) -> None:
        """A packet was refused."""
        self._values[_DROPPED] += 1

    def read(self) -> Counts:
        """The present values."""
        return Counts(*self._values[:3])
