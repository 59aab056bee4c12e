# SPDX-License-Identifier: Apache-2.0
"""Edge (a C compiler, sockets): servers.c as a library, and the sockets of its two sides."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.compiled import shared_library
from bench.experiment import Unmeasured

Vector = NDArray[np.float32]
VALUES = 367
"""Float32 values of a datagram (the paper's section 4.1)."""
UDP, LOCKED, SPINS, PINNED, MILLPOND, BUSY_POLL = 1, 2, 4, 8, 16, 32
"""Bits of how a server works, the first four as servers.c has them; MILLPOND is the product's own engine."""
_FOLDER = Path(__file__).parent
_SO_RCVBUFFORCE, _SO_BUSY_POLL, _UDP_GRO = 33, 46, 104
_BUSY_POLL_US = 50
_SLOT = 4096
"""Bytes of a receive buffer that the kernel counts for a datagram, at most."""


def build(folder: Path) -> Path:
    """Return the library, built in ``folder``. Raises Unmeasured without a compiler."""
    return shared_library(_FOLDER / "servers.c", folder, f"-I{_FOLDER.parents[1] / 'aggregate'}")


def blocks(size: int) -> int:
    """Return how many datagrams a vector of ``size`` values takes."""
    return -(-size // VALUES)


def datagram_socket(vectors: int, size: int) -> socket.socket:
    """Return a UDP socket on loopback whose receive buffer holds so many vectors, as a card's queues do that
    are polled in time. Raises Unmeasured.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    made.setsockopt(socket.SOL_UDP, _UDP_GRO, 1)
    try:
        made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, vectors * blocks(size) * _SLOT // 2 + (1 << 20))
    except PermissionError:
        made.close()
        raise Unmeasured("receive buffers of a round take CAP_NET_ADMIN") from None
    return made


def busy_poll(connection: socket.socket, *, on: bool) -> None:
    """Have the kernel poll the card for ``connection``, or not."""
    connection.setsockopt(socket.SOL_SOCKET, _SO_BUSY_POLL, _BUSY_POLL_US if on else 0)


class Library:
    """The calls of servers.c."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name in ("run_server", "run_clients"):
            getattr(self._library, name).restype = ctypes.c_long

    def serve(
        self, sockets: Sequence[int], clients: int, how: int, sums: Vector, mean: Vector
    ) -> tuple[list[float], int]:
        """Run a round. Returns the clock's seconds of the first START, the last END and the mean, and how
        many datagrams have come.
        """
        counts, times = np.zeros(blocks(len(mean)), np.uint32), np.zeros(3)
        numbers = (ctypes.c_int * len(sockets))(*sockets)
        pointers = [ctypes.c_void_p(each.ctypes.data) for each in (sums, mean, counts)]
        size, at = ctypes.c_size_t(len(mean)), ctypes.c_void_p(times.ctypes.data)
        came = self._library.run_server(numbers, clients, len(sockets), how, *pointers, size, at)
        if came < 0:
            raise RuntimeError("a client of the round has gone")
        return times.tolist(), came

    def participate(
        self, sockets: Sequence[int], how: int, vectors: Vector, means: Vector, lost: float, seed: int
    ) -> tuple[list[float], int]:
        """Run the clients of a round, which send rows of ``vectors`` and write ``means``; the share ``lost``
        of datagrams of the mean is dropped. Returns their seconds, and how many of these have come.
        """
        seconds = np.zeros(len(sockets))
        numbers = (ctypes.c_int * len(sockets))(*sockets)
        rows, found, at = (ctypes.c_void_p(each.ctypes.data) for each in (vectors, means, seconds))
        size, dropped = ctypes.c_size_t(vectors.shape[1]), ctypes.c_uint64(int(lost * (1 << 32)))
        came = self._library.run_clients(
            numbers, len(sockets), how, rows, found, size, dropped, ctypes.c_uint64(seed), at
        )
        if came < 0:
            raise RuntimeError("the server of the round has gone")
        return seconds.tolist(), came
