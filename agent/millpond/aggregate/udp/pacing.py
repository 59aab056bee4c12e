# SPDX-License-Identifier: Apache-2.0
"""Pure: how fast datagrams may go out, and how fast they come in. Times are seconds of any one clock."""

from __future__ import annotations

WIRE_OVERHEAD = 66
"""Bytes of a datagram on Ethernet beside its own: IP and UDP headers, frame, preamble and gap."""
_CATCH_UP, _BEHIND_SECONDS = 1.5, 0.25
_LEAST_BURST, _BURST_SECONDS = 48 << 10, 0.01
_INTERVAL = 0.02
_INTERVALS = 8


class Pacer:
    """A token bucket for datagrams of up to ``unit`` bytes, without a limit until it has a rate.

    A process that had to wait for a processor catches up, but not in one burst: a second bucket holds it to
    1.5 times the rate.
    """

    def __init__(self, unit: int) -> None:
        self._least = max(_LEAST_BURST, 2 * unit)
        self._rate = self._at = 0.0
        self._tokens = self._burst = float(self._least)

    def set_rate(self, rate: float) -> None:
        """Go on at another rate, in bytes per second."""
        self._rate = rate

    def allowance(self, now: float) -> float:
        """Return how many bytes may go out now."""
        if not self._rate:
            return float("inf")
        if self._at:
            new = (now - self._at) * self._rate
            self._tokens = min(max(self._least, self._rate * _BEHIND_SECONDS), self._tokens + new)
            self._burst = min(max(self._least, self._rate * _BURST_SECONDS), self._burst + _CATCH_UP * new)
        self._at = now
        return max(min(self._tokens, self._burst), 0.0)

    def spend(self, size: float) -> None:
        """Account for bytes that went out."""
        if self._rate:
            self._tokens -= size
            self._burst -= size

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
