# SPDX-License-Identifier: Apache-2.0
"""Edge: share the counters of an endpoint's pumps, in a memory file that other processes read at any time.

Per direction 16 words of 64 bits, in the order of ``PacketStats``: first for packets from the
interface, then for those to it.
"""

from __future__ import annotations

import mmap
import os

from millpond.base.errors import LocalError
from millpond.tunnel.datapath.stats import PacketStats

_WORDS = 16
SIZE = 2 * _WORDS * 8


FIELDS = PacketStats.__slots__
_PACKETS, _BYTES, _NOTIFICATIONS, _SLEEPS, _BACKLOG, _FULL = range(6)


class SharedStats:
    """One direction's counters in mapped memory. One process writes them."""

    def __init__(self, words: memoryview | None = None) -> None:
        self.words = memoryview(bytearray(8 * _WORDS)).cast("Q") if words is None else words

    def count(self, size: int, backlog: int = 0) -> None:
        """Count a packet of ``size`` bytes that went through while ``backlog`` entries of the ring were in
        use.
        """
        words = self.words
        words[_PACKETS] += 1
        words[_BYTES] += size
        if backlog:
            words[_BACKLOG] += backlog

    def notified(self) -> None:
        """Count a notification of the peer."""
        self.words[_NOTIFICATIONS] += 1

    def slept(self) -> None:
        """Count a sleep of the pump."""
        self.words[_SLEEPS] += 1

    def was_full(self) -> None:
        """Count a wait for a free entry."""
        self.words[_FULL] += 1

    def drop(self, cause: str) -> None:
        """Count a dropped packet; ``cause`` names a field of PacketStats."""
        self.words[FIELDS.index(cause)] += 1

    def read(self) -> PacketStats:
        """Return the present values."""
        return PacketStats(*self.words[: len(FIELDS)])


def make_stats() -> int:
    """Make a memory file for one endpoint's counters. The descriptor is the caller's."""
    descriptor = os.memfd_create("millpond-counters", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, SIZE)
    return descriptor


def map_stats(descriptor: int) -> tuple[SharedStats, SharedStats]:
    """Map the counters from the interface and to it, in a file of ``make_stats``. Raises LocalError."""
    if os.fstat(descriptor).st_size != SIZE:
        raise LocalError(f"the counters' file has another size than {SIZE} bytes")
    words = memoryview(mmap.mmap(descriptor, SIZE)).cast("Q")
    return SharedStats(words[:_WORDS]), SharedStats(words[_WORDS:])
