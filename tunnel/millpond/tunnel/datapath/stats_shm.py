"""Edge: what a pump counts, in memory that its end and whoever started the end can read at any time.

Per direction 16 words of 64 bits, in the order of ``PacketStats``: first what comes from the
interface, then what goes to it.
"""

from __future__ import annotations

import mmap
import os

from millpond.base.errors import LocalError
from millpond.tunnel.datapath.stats import PacketStats

_WORDS = 16
SIZE = 2 * _WORDS * 8


FIELDS = PacketStats.__slots__
_PACKETS, _BYTES, _BELLS, _SLEEPS, _BACKLOG, _FULL = range(6)


class SharedStats:
    """One direction's counters, over its words. One writer."""

    def __init__(self, words: memoryview | None = None) -> None:
        self.words = memoryview(bytearray(8 * _WORDS)).cast("Q") if words is None else words

    def count(self, size: int, backlog: int = 0) -> None:
        """A packet of ``size`` bytes went through, ``backlog`` entries of the ring being in use."""
        words = self.words
        words[_PACKETS] += 1
        words[_BYTES] += size
        if backlog:
            words[_BACKLOG] += backlog

    def rang(self) -> None:
        """The peer was woken."""
        self.words[_BELLS] += 1

    def slept(self) -> None:
        """The pump went to sleep."""
        self.words[_SLEEPS] += 1

    def was_full(self) -> None:
        """No entry was free."""
        self.words[_FULL] += 1

    def drop(self, cause: str) -> None:
        """A packet was dropped; ``cause`` names a field of Counts."""
        self.words[FIELDS.index(cause)] += 1

    def read(self) -> PacketStats:
        """The present values."""
        return PacketStats(*self.words[: len(FIELDS)])


def make_stats() -> int:
    """A memory file for one end's counters. The descriptor is the caller's."""
    descriptor = os.memfd_create("millpond-counters", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, SIZE)
    return descriptor


def map_stats(descriptor: int) -> tuple[SharedStats, SharedStats]:
    """The counters from the interface and to it, in a file that ``make_stats`` made. Raises LocalError."""
    if os.fstat(descriptor).st_size != SIZE:
        raise LocalError(f"the counters' file has another size than {SIZE} bytes")
    words = memoryview(mmap.mmap(descriptor, SIZE)).cast("Q")
    return SharedStats(words[:_WORDS]), SharedStats(words[_WORDS:])
