# SPDX-License-Identifier: Apache-2.0
"""Pure: the receiving side of one vector: grants while it comes, and at its end what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from millpond.aggregate.udp.arrivals import bitmap_size
from millpond.aggregate.udp.datagrams import EARLY, LARGEST_SEQUENCE, Datagram, DatagramKind
from millpond.aggregate.udp.pacing import WIRE_OVERHEAD, RateMeter

if TYPE_CHECKING:
    from millpond.aggregate.udp.arrivals import Arrivals
    from millpond.aggregate.udp.datagrams import VectorPlan

Word = tuple[DatagramKind, int, int, bytes]
"""Kind, sequence number, index and payload of a datagram without values."""

RATE_UNIT = 1024
"""Bytes per second of one unit of the rate in a GRANT."""
_MARGIN = 8
"""Bytes of a bitmap that are not asked for yet: so many datagrams may be overtaken."""
_FIRST_FLIGHT, _LEAST_FLIGHT, _FLIGHT_SECONDS, _PROBING = 256, 64, 0.01, 1.1


class Credit:
    """Bounds what all senders together may have on the way: at most ``most`` datagrams, as the receive buffer
    holds no more. The senders are let go a little faster than data came so far, with what comes in 10 ms on
    the way.
    """

    def __init__(self, plan: VectorPlan, most: int) -> None:
        self._size, self._most = plan.datagram + WIRE_OVERHEAD, most
        self._meter = RateMeter()

    def arrived(self, datagrams: int, now: float) -> None:
        """Account for data that has come."""
        self._meter.add(datagrams * self._size, now)

    def share(self, senders: int) -> tuple[int, float]:
        """Return the datagrams and the bytes per second of each of so many senders."""
        senders, measured, flight = max(senders, 1), self._meter.rate, _FIRST_FLIGHT
        if measured:
            flight = max(int(measured * _FLIGHT_SECONDS / self._size), _LEAST_FLIGHT)
        return max(min(flight, self._most) // senders, 1), _PROBING * measured / senders


class IncomingStream:
    """A vector's way from the sender of the row ``row`` of ``arrivals``. With ``in_order`` the sender's
    indices rise, so that what is missing can be told before the end.
    """

    def __init__(self, arrivals: Arrivals, row: int, *, in_order: bool = False) -> None:
        self._arrivals, self._row, self._in_order = arrivals, row, in_order
        self.ended, self.started, self.limit, self._asked = False, False, 0, 0

    def hear(self, message: Datagram, share: tuple[int, float]) -> list[Word]:
        """Return the answers to a word of the sender."""
        kind, seen = message.kind & 7, self._arrivals.seen
        if kind == DatagramKind.START and message.payload != self._arrivals.plan.pack():
            self._arrivals.count("length")
            return []
        self.started = True
        # What went out and has not come is lost, or will not be many datagrams.
        seen[self._row] = max(int(seen[self._row]), message.sequence)
        if kind == DatagramKind.END:
            return self._end(message, share)
        return [self._grant(share)] if kind in (DatagramKind.START, DatagramKind.PROBE) else []

    def next_grants(self, share: tuple[int, float]) -> list[Word]:
        """Return a grant where it is worth a datagram, and what is missing meanwhile."""
        window = share[0]
        worth = self._seen + window >= self.limit + max(window // 4, 1)
        if not (worth and self.started) or self.ended:
            return []
        return [self._grant(share), *(self._missing_so_far() if self._in_order else ())]

    def _missing_so_far(self) -> list[Word]:
        """Return what others have overtaken by far, each time from where the last one ended."""
        start = self._asked >> 3
        found = np.flatnonzero(self._arrivals.bits[self._row, start:])
        stop = min(
            start + bitmap_size(self._arrivals.plan), start + int(found[-1]) - _MARGIN if len(found) else 0
        )
        if stop <= start or not self._arrivals.plan.repair:
            return []
        first, self._asked = self._asked, 8 * stop
        bitmap = self._arrivals.missing(self._row)[start:stop]
        return [(DatagramKind.MISSING, EARLY, first, bitmap.tobytes())] if bitmap.any() else []

    @property
    def _seen(self) -> int:
        """The sender's numbers that are no longer on the way; it may claim what it likes, but not beyond its
        grant.
        """
        return min(int(self._arrivals.seen[self._row]), self.limit)

    def _grant(self, share: tuple[int, float]) -> Word:
        window, rate = share
        self.limit = min(max(self.limit, self._seen + window), LARGEST_SEQUENCE)
        return DatagramKind.GRANT, self.limit, min(-(-int(rate) // RATE_UNIT), (1 << 32) - 1), b""

    def _end(self, message: Datagram, share: tuple[int, float]) -> list[Word]:
        plan, row, passed = self._arrivals.plan, self._row, message.index
        if self.ended or not plan.repair or self._arrivals.is_whole(row):
            self.ended = True
            return [(DatagramKind.ENDED, 0, passed, b"")]
        bitmap, step = self._arrivals.missing(row), bitmap_size(plan)
        kind, parts = (
            DatagramKind.MISSING,
            (bitmap[start : start + step] for start in range(0, len(bitmap), step)),
        )
        words = [
            (kind, passed, 8 * step * place, part.tobytes()) for place, part in enumerate(parts) if part.any()
        ]
        return [self._grant(share), *words]
