# SPDX-License-Identifier: Apache-2.0
"""Edge (sockets): the same round over TCP: plain sockets and one loop, adding while the vectors come.

``pipelined`` sends parts of the mean as soon as all clients have sent theirs, as the UDP protocol does; the
plain server, as in the paper, sends when everything has come.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.aggregate.exact import scale_of
from millpond.aggregate.kernels import kernels

Vector = NDArray[np.float32]
_READ = 1 << 18
_LEAST_PART = 1 << 14
"""Values of the mean that are divided at once, where they are sent while others come."""


class TcpServer:
    """Rounds over connections that stay open."""

    def __init__(self, connections: Sequence[socket.socket], size: int, largest: float) -> None:
        self._connections, self._size, self._kernels = connections, size, kernels()
        self._totals, self._mean = np.zeros(size), np.empty(size, np.float32)
        self._shift, self._largest = 3 * 2.0**51 / scale_of(largest, len(connections)), largest
        for each in connections:
            each.setblocking(False)

    def round(self, *, pipelined: bool) -> None:
        """Add all vectors and send everybody the mean."""
        count = len(self._connections)
        self._totals[:] = 0.0
        buffers = [bytearray(_READ + 4) for _ in range(count)]
        received, kept, sent, ready = [0] * count, [0] * count, [0] * count, 0
        whole, mean = 4 * self._size, self._mean.data.cast("B")
        with selectors.DefaultSelector() as selector:
            for number, each in enumerate(self._connections):
                selector.register(each, selectors.EVENT_READ, number)
            while min(sent) < whole:
                for key, events in selector.select():
                    number, connection = key.data, self._connections[key.data]
                    if events & selectors.EVENT_READ:
                        self._read(connection, number, buffers, received, kept)
                    if events & selectors.EVENT_WRITE:
                        sent[number] += connection.send(mean[sent[number] : ready])
                ready = self._divide(ready, min(received) // 4, pipelined)
                for number, each in enumerate(self._connections):
                    wanted = selectors.EVENT_READ if received[number] < whole else 0
                    wanted |= selectors.EVENT_WRITE if sent[number] < ready else 0
                    _watch(selector, each, wanted, number)

    def _read(
        self,
        connection: socket.socket,
        number: int,
        buffers: list[bytearray],
        received: list[int],
        kept: list[int],
    ) -> None:
        view, left = memoryview(buffers[number]), 4 * self._size - received[number]
        start = kept[number]
        count = connection.recv_into(view[start : start + min(left, _READ)])
        if not count:
            raise ConnectionError("a client has gone")
        values, rest = divmod(start + count, 4)
        first = (received[number] - start) // 4
        part = np.frombuffer(view[: 4 * values], np.float32)
        self._kernels.add_rounded(self._totals[first : first + values], part, 1.0, self._shift, self._largest)
        view[:rest] = bytes(view[4 * values : 4 * values + rest])
        received[number] += count
        kept[number] = rest

    def _divide(self, ready: int, values: int, pipelined: bool) -> int:
        """Divide what all have sent. Returns the bytes of the mean that may go out."""
        done = ready // 4
        if values == done or (values < self._size and not (pipelined and values - done >= _LEAST_PART)):
            return ready
        self._kernels.divide(
            self._mean[done:values], self._totals[done:values], float(len(self._connections))
        )
        return 4 * values


def _watch(selector: selectors.BaseSelector, connection: socket.socket, wanted: int, number: int) -> None:
    known = selector.get_map().get(connection)
    if known is None:
        if wanted:
            selector.register(connection, wanted, number)
    elif not wanted:
        selector.unregister(connection)
    elif known.events != wanted:
        selector.modify(connection, wanted, number)


def tcp_exchange(connection: socket.socket, values: Vector) -> Vector:
    """Send a vector and return the mean; both at once, where the server does."""
    mean = np.empty_like(values)
    outgoing, incoming = values.data.cast("B"), mean.data.cast("B")
    sent = received = 0
    connection.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while received < len(incoming):
            for _, events in selector.select():
                if events & selectors.EVENT_READ:
                    count = connection.recv_into(incoming[received:])
                    if not count:
                        raise ConnectionError("the server has gone")
                    received += count
                if events & selectors.EVENT_WRITE:
                    sent += connection.send(outgoing[sent : sent + _READ])
                    if sent == len(outgoing):
                        selector.modify(connection, selectors.EVENT_READ)
    return mean
