# SPDX-License-Identifier: Apache-2.0
"""Edge (sockets, the clock): blocking calls for both sides of a round, on sockets that serve many rounds."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from millpond.aggregate.kernels import Vector
from millpond.aggregate.udp import native
from millpond.aggregate.udp.aggregator import STALL_SECONDS, Aggregator, ClientHead
from millpond.aggregate.udp.datagrams import OVERHEAD, VectorPlan
from millpond.aggregate.udp.outgoing import Outgoing, RoundSide, Train
from millpond.aggregate.udp.participant import Participant
from millpond.aggregate.udp.python_engine import PythonEngine
from millpond.aggregate.udp.sums import BlockSums, ClientVectors
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, RemoteError

EngineName = Literal["auto", "python", "c"]
_LEAST_SLOT = 4096
"""Bytes that a datagram takes of a receive buffer at most, if it is small: drivers fill pages."""
_LONGEST_WAIT = 1.0
_REST, _REST_PER_SLOT = 0.001, 2e-6
"""Seconds in which datagrams gather, so that each does not cost a turn of the loop: at most as long as a
small receive buffer takes to fill at a gigabyte per second.
"""


class LostClients(RemoteError):
    """The clients that a round has ``lost``, each for a reason."""

    def __init__(self, lost: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"client {client}: {fault}" for client, fault in lost.items()))
        self.lost = dict(lost)


@dataclass(frozen=True, slots=True)
class ReceivedMean:
    """The mean as a client has it, and what became of datagrams, by name."""

    mean: Vector
    counted: dict[str, int]


def ignore(_size: int) -> None:
    """Count nothing."""


def aggregate(
    connection: socket.socket,
    plan: VectorPlan,
    clients: Sequence[ClientHead],
    deadline: Deadline = NEVER,
    *,
    stall: float = STALL_SECONDS,
    engine: EngineName = "auto",
    abandoned: threading.Event | None = None,
    repaired: Callable[[int], None] = ignore,
) -> dict[str, int]:
    """Send the clients the sum of their vectors over that of their weights. Returns what became of datagrams,
    by name. A client without END by the deadline is lost, and so is one of which no datagram comes for
    ``stall`` seconds. The event ``abandoned`` ends the round within a second. However the round ends,
    ``repaired`` is told how many bytes of values went out more than once.

    Raises LostClients, and ConnectionLost if the round is abandoned.
    """
    sums, now = BlockSums(plan, clients), time.monotonic()
    window = _window(connection, plan)
    side = Aggregator(plan, clients, sums, window=window, now=now, stall=stall, deadline=deadline.at)
    try:
        _run(connection, side, _engine(engine, connection, side, sums), NEVER, abandoned)
    finally:
        repaired(4 * plan.values * side.repaired)
    if side.lost:
        raise LostClients(side.lost)
    return side.arrivals.counted()


def exchange(
    connection: socket.socket,
    aggregator: tuple[str, int],
    plan: VectorPlan,
    client: int,
    key: bytes,
    values: Vector,
    deadline: Deadline = NEVER,
    *,
    weight: float = 1.0,
    engine: EngineName = "auto",
    abandoned: threading.Event | None = None,
    repaired: Callable[[int], None] = ignore,
) -> ReceivedMean:
    """Send a client's vector and return the mean. Without repair, ``values`` over ``weight`` stand where the
    mean does not come. The event ``abandoned`` ends the round within a second.
    However the round ends, ``repaired`` is told how many bytes of values went out more than once.

    Raises DeadlineExceeded, and ConnectionLost if the round is abandoned.
    """
    vectors, now = ClientVectors(plan, values, weight), time.monotonic()
    window = _window(connection, plan)
    side = Participant(plan, client, key, vectors, aggregator, window=window, now=now)
    try:
        _run(connection, side, _engine(engine, connection, side, vectors), deadline, abandoned)
    finally:
        repaired(4 * plan.values * side.repaired)
    return ReceivedMean(vectors.mean, side.arrivals.counted())


def resolve(engine: EngineName) -> EngineName:
    """Resolve ``auto``: c where the library is built and loads, else python."""
    if engine != "auto":
        return engine
    return "c" if native.is_usable() else "python"


def _engine(
    name: EngineName, connection: socket.socket, side: RoundSide, values: BlockSums | ClientVectors
) -> PythonEngine | native.NativeEngine:
    if resolve(name) == "c":
        return native.NativeEngine(connection, side, values)
    return PythonEngine(connection, side, values.payload)


def _run(
    connection: socket.socket,
    side: RoundSide,
    engine: PythonEngine | native.NativeEngine,
    deadline: Deadline,
    abandoned: threading.Event | None,
) -> None:
    """Send and receive until the side is finished. Raises DeadlineExceeded, and ConnectionLost if the round
    is abandoned.
    """
    poller, received, more = select.poll(), 0.0, False
    rest = min(_REST, _REST_PER_SLOT * _window(connection, side.plan))
    while not side.finished:
        if abandoned and abandoned.is_set():
            raise ConnectionLost(f"round {side.plan.round} was abandoned")
        now = time.monotonic()
        full = _send(side, engine, side.poll(now))
        poller.register(connection, select.POLLIN | (select.POLLOUT if full else 0))
        until = now + _LONGEST_WAIT if full else side.due(now)
        wait = _LONGEST_WAIT if until is None else until - time.monotonic()
        left = deadline.remaining()
        wait = wait if left is None else min(wait, left)
        if poller.poll(max(min(wait, _LONGEST_WAIT), 0.0) * 1000):
            if not more:
                time.sleep(max(received + rest - time.monotonic(), 0.0))
            received = time.monotonic()
            more = engine.receive(received)
    _send(side, engine, side.poll(time.monotonic()))


def _send(side: RoundSide, engine: PythonEngine | native.NativeEngine, outgoing: list[Outgoing]) -> bool:
    """Send. Returns whether the socket's buffer is full."""
    full = False
    for each in outgoing:
        if not isinstance(each, Train):
            engine.send(each)  # what is not sent is said again
        elif not full:
            count = engine.send(each)
            side.sent(each, count)
            full = count < len(each.indices)
    return full


def _window(connection: socket.socket, plan: VectorPlan) -> int:
    """Return how many datagrams the receive buffer holds."""
    slot = max(_LEAST_SLOT, 1 << (plan.datagram + OVERHEAD).bit_length())
    return max(connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // slot, 1)
