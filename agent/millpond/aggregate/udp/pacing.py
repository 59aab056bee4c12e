# SPDX-License-Identifier: Apache-2.0
"""Pure: how fast datagrams may go out, and how fast they come in. Times are seconds of any one clock."""

from __future__ import annotations

WIRE_OVERHEAD = 66
"""Bytes of a datagram on Ethernet beside its own: IP and UDP headers, frame, preamble and gap."""
_BURST_SECONDS = 0.01
"""For so long a process may wait for a processor without falling behind its pace."""
_LEAST_BURST = 32 << 10
_INTERVAL = 0.02
_INTERVALS = 8


class Pacer:
    """A token bucket for datagrams of up to ``unit`` bytes; ``rate`` in bytes per second, 0 for no limit."""

    def __init__(self, unit: int, rate: float = 0.0) -> None:
        self._least = max(_LEAST_BURST, 2 * unit)
        self._rate, self._tokens, self._at = 0.0, 0.0, 0.0
        self.set_rate(rate)
        self._tokens = self._burst

    def set_rate(self, rate: float) -> None:
        """Go on at another rate."""
        self._rate = rate
        self._burst = max(self._least, rate * _BURST_SECONDS)

    def allowance(self, now: float) -> float:
        """Return how many bytes may go out now."""
        if not self._rate:
            return float("inf")
        if self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        return max(self._tokens, 0.0)

    def spend(self, size: float) -> None:
        """Account for bytes that went out."""
        if self._rate:
            self._tokens -= size

    def due(self, now: float) -> float:
        """Return when a train may go out: waking for less costs more than it gives."""
        short = 0.8 * self._least - self.allowance(now)
        return now + short / self._rate if self._rate and short > 0 else now


class RateMeter:
    """The bytes per second that arrive: the most of the last intervals, as a sender that rests says nothing
    about the path.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._size = 0.0
        self._rates: list[float] = []

    def add(self, size: float, now: float) -> None:
        """Count bytes that have arrived."""
        if self._began is None:
            self._began = now
            return
        self._size += size
        if now - self._began >= _INTERVAL:
            self._rates = [*self._rates[1 - _INTERVALS :], self._size / (now - self._began)]
            self._began, self._size = now, 0.0

    @property
    def rate(self) -> float:
        """0.0 before the first interval is over."""
        return max(self._rates, default=0.0)
