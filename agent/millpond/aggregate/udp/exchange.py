# SPDX-License-Identifier: Apache-2.0
"""Edge (sockets, the clock): blocking calls for both sides of a round, on sockets that serve many rounds."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Sequence
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
from millpond.base.errors import RemoteError

EngineName = Literal["auto", "python", "c"]
RECEIVE_BUFFER = 8 << 20
"""Bytes that are asked for; without CAP_NET_ADMIN the kernel gives what net.core.rmem_max allows."""
SEND_BUFFER = 1 << 20
_LEAST_SLOT = 4096
"""Bytes that a datagram takes of a receive buffer at most, if it is small: drivers fill pages."""
_LONGEST_WAIT = 1.0
_REST, _REST_PER_SLOT = 0.001, 2e-6
"""Seconds in which datagrams gather, so that each does not cost a turn of the loop: at most as long as a
small receive buffer takes to fill at a gigabyte per second.
"""
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


@dataclass(frozen=True, slots=True)
class AggregatedRound:
    """What an aggregator has done: its mean, faults by client, who did not confirm the mean, and what became
    of datagrams, by name.
    """

    mean: Vector | None
    lost: dict[int, str]
    unconfirmed: tuple[int, ...]
    counted: dict[str, int]
    revisions: int


@dataclass(frozen=True, slots=True)
class ReceivedMean:
    """The mean as a client has it, how many of its datagrams are the client's own values, and what became of
    datagrams.
    """

    mean: Vector
    own: int
    counted: dict[str, int]


def open_socket(address: tuple[str, int], receive_buffer: int = RECEIVE_BUFFER) -> socket.socket:
    """Return a UDP socket at ``address`` for either side. Raises OSError."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        _set_buffer(connection, socket.SO_RCVBUF, _SO_RCVBUFFORCE, receive_buffer)
        _set_buffer(connection, socket.SO_SNDBUF, _SO_SNDBUFFORCE, SEND_BUFFER)
        connection.bind(address)
    except OSError:
        connection.close()
        raise
    return connection


def aggregate(
    connection: socket.socket,
    plan: VectorPlan,
    clients: Sequence[ClientHead],
    deadline: Deadline = NEVER,
    *,
    rate: float = 0.0,
    stall: float = STALL_SECONDS,
    engine: EngineName = "auto",
    with_mean: bool = True,
) -> AggregatedRound:
    """Sum the clients' vectors and send them the mean. Clients without END by the deadline are left out;
    ``stall`` seconds without a datagram of a client do the same. ``rate`` is the LAN's, in bytes per second,
    0 to measure it.

    Raises RemoteError if no client is left.
    """
    sums, now = BlockSums(plan, clients), time.monotonic()
    window = _window(connection, plan)
    side = Aggregator(
        plan, clients, sums, window=window, now=now, rate=rate, stall=stall, deadline=deadline.at
    )
    _run(connection, side, _engine(engine, connection, side, sums), NEVER)
    if not side.present:
        faults = "; ".join(f"client {client}: {fault}" for client, fault in side.lost.items())
        raise RemoteError(f"no client of round {plan.round} is left: {faults}")
    mean = sums.mean(side.arrivals.counts) if with_mean else None
    counted, unconfirmed = side.arrivals.counted(), tuple(sorted(side.unconfirmed))
    return AggregatedRound(mean, side.lost, unconfirmed, counted, side.arrivals.revision)


def exchange(
    connection: socket.socket,
    aggregator: tuple[str, int],
    plan: VectorPlan,
    client: int,
    key: bytes,
    values: Vector,
    weight: float = 1.0,
    deadline: Deadline = NEVER,
    *,
    engine: EngineName = "auto",
) -> ReceivedMean:
    """Send a client's vector and return the mean. ``values`` over ``weight`` stand where the mean does not
    come.

    Raises DeadlineExceeded.
    """
    vectors, now = ClientVectors(plan, values, weight), time.monotonic()
    window = _window(connection, plan)
    side = Participant(plan, client, key, vectors, aggregator, window=window, now=now)
    _run(connection, side, _engine(engine, connection, side, vectors), deadline)
    own = plan.blocks - int(side.arrivals.received[0])
    return ReceivedMean(vectors.mean, own, side.arrivals.counted())


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
    connection: socket.socket, side: RoundSide, engine: PythonEngine | native.NativeEngine, deadline: Deadline
) -> None:
    """Send and receive until the side is finished. Raises DeadlineExceeded."""
    poller, received, more = select.poll(), 0.0, False
    rest = min(_REST, _REST_PER_SLOT * _window(connection, side.plan))
    while not side.finished:
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


def _set_buffer(connection: socket.socket, option: int, forced: int, size: int) -> None:
    connection.setsockopt(socket.SOL_SOCKET, option, size)
    with contextlib.suppress(PermissionError):
        connection.setsockopt(socket.SOL_SOCKET, forced, size)
