# SPDX-License-Identifier: Apache-2.0
"""Edge (a socket): the engine in Python, one datagram at a time: the reference of engine.c, and its
replacement.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from itertools import islice

from millpond.aggregate.udp.datagrams import LARGEST_DATAGRAM
from millpond.aggregate.udp.outgoing import Outgoing, RoundSide, SealedDatagram, Train, datagrams_of

UDP_GRO = 104
_AT_ONCE = 256
"""Datagrams that are received before the clock is looked at."""


class PythonEngine:
    """Sends and receives the datagrams of one side of a round; ``payload(index)`` are the values that it
    sends.
    """

    def __init__(self, connection: socket.socket, side: RoundSide, payload: Callable[[int], bytes]) -> None:
        self._socket, self._side, self._payload = connection, side, payload
        connection.setsockopt(socket.SOL_UDP, UDP_GRO, 0)  # a round of the C engine may have set it

    def send(self, outgoing: Outgoing) -> int:
        """Send, and return how many datagrams went out before the socket's buffer was full."""
        if isinstance(outgoing, SealedDatagram):
            return self._send(outgoing.content, outgoing)
        return self._send_train(outgoing)

    def receive(self, now: float) -> bool:
        """Take some of what has come. Returns whether there may be more."""
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
            for _ in range(_AT_ONCE):
                datagram, address = self._socket.recvfrom(LARGEST_DATAGRAM + 1, socket.MSG_DONTWAIT)
                self._side.receive(datagram, address, now)
            return True
        return False

    def _send_train(self, train: Train) -> int:
        found = datagrams_of(self._side, train, self._payload)
        for count, datagram in enumerate(islice(found, len(train.indices))):
            if not self._send(datagram, train):
                return count
        return len(train.indices)

    def _send(self, datagram: bytes, outgoing: Outgoing) -> int:
        try:
            self._socket.sendto(datagram, socket.MSG_DONTWAIT, outgoing.address)  # type: ignore[call-overload]
        except (BlockingIOError, ConnectionRefusedError):
            return 0
        return 1
