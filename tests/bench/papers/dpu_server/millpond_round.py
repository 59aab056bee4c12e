# SPDX-License-Identifier: Apache-2.0
"""Edge (sockets): the clients of a round of the product's own engine, a thread each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from socket import socket

from bench.papers.dpu_server.library import Vector
from millpond.aggregate.udp.aggregator import ClientHead
from millpond.aggregate.udp.datagrams import KEY_SIZE, VectorPlan
from millpond.aggregate.udp.exchange import exchange
from millpond.base.deadline import Deadline

_LARGEST, _SECONDS = 64.0, 60.0


def plan(number: int, size: int) -> VectorPlan:
    """Return the plan of round ``number``."""
    return VectorPlan(number, size)


def heads(clients: int) -> list[ClientHead]:
    """Return what the server knows of the clients."""
    return [ClientHead(_key(client), 1.0, _LARGEST) for client in range(clients)]


def participate(sockets: Sequence[socket], port: int, number: int, vectors: Vector, means: Vector) -> float:
    """Run the clients of a round, whose vectors are rows. Returns the seconds until the last one has its
    mean.
    """

    def run(client: int) -> float:
        began, until = time.monotonic(), Deadline.after(_SECONDS)
        given, key = plan(number, vectors.shape[1]), _key(client)
        hub = ("127.0.0.1", port)
        means[client] = exchange(sockets[client], hub, given, client, key, vectors[client], until).mean
        return time.monotonic() - began

    with ThreadPoolExecutor(len(sockets)) as pool:
        return max(pool.map(run, range(len(sockets))))


def _key(client: int) -> bytes:
    return bytes([client + 1]) * KEY_SIZE
