# SPDX-License-Identifier: Apache-2.0
"""Pure: restore the order of packets by sequence numbers modulo 2^32: commands may overtake each other."""

from __future__ import annotations

from collections.abc import Iterator

from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.transports.nvme.ioctl import MODULUS


class Resequencer:
    """Orders packets by numbers from 0; keeps at most ``window - 1`` while an earlier one is missing."""

    def __init__(self, window: int) -> None:
        self._window, self._next = window, 0
        self._early: dict[int, bytes] = {}

    def accept(self, number: int, packet: memoryview) -> Iterator[bytes | memoryview]:
        """Return the packets that are next in order. Raises LinkViolation for a repeated number or one beyond
        the window.
        """
        ahead = (number - self._next) % MODULUS
        if ahead >= self._window:
            raise LinkViolation(f"sequence number {number}, expected {self._next}")
        if ahead == 0:
            return self._turn(packet)
        if number in self._early:
            raise LinkViolation(f"sequence number {number} twice")
        self._early[number] = bytes(packet)
        return iter(())

    def _turn(self, packet: memoryview) -> Iterator[bytes | memoryview]:
        due: bytes | memoryview | None = packet
        while due is not None:
            self._next = (self._next + 1) % MODULUS
            yield due
            due = self._early.pop(self._next, None)
