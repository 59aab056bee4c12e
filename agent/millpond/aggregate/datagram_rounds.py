# SPDX-License-Identifier: Apache-2.0
"""Edge (sockets, threads): the reduction of a star by UDP on a LAN: the root is the aggregator, and the mean
reaches all nodes with it. ``docs/explanation/udp-aggregation.md`` describes the datagrams.

Lost datagrams are sent again, so the mean has the bits of the same reduction by TCP; a job without repair
leaves them out instead (see ``unrepaired``). All updates count, or the reduction fails. Each client has a key
of its own for one round, which the root sends it over their authenticated channel.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from millpond.aggregate.kernels import LARGEST, Vector
from millpond.aggregate.messages import FetchSums, FetchWords, JoinRound, RoundJoined, Unrepaired
from millpond.aggregate.progress import STALL_SECONDS, expect
from millpond.aggregate.udp.aggregator import ClientHead
from millpond.aggregate.udp.datagrams import KEY_SIZE, MOST_CLIENTS, VectorPlan, values_at
from millpond.aggregate.udp.exchange import LostClients, aggregate, exchange, ignore
from millpond.aggregate.unrepaired import most_of
from millpond.base.deadline import Deadline
from millpond.base.errors import ProtocolError, RemoteError
from millpond.base.sizes import SLOWEST
from millpond.wire.channel import Channel
from millpond.wire.control_messages import JOB_PORTS
from millpond.wire.messages import Ok

_ROUNDS = 1 << 32


class DatagramRounds:
    """Rounds of a node on two UDP sockets of the LAN ``network`` with this ``mtu``: ``hub`` is for those that
    the node leads, ``own`` for its updates. ``passing`` is called with the bytes of each update before it is
    sent, and with those of each mean, whose parts leave as soon as they are known, when the round is over;
    ``repaired`` with the number of bytes of either that were sent again.
    """

    def __init__(
        self,
        hub: socket.socket,
        own: socket.socket,
        mtu: int,
        network: str,
        passing: Callable[[memoryview], None],
        repaired: Callable[[int], None],
    ) -> None:
        self._hub, self._own, self._values, self._passing = hub, own, values_at(mtu), passing
        self._repaired = repaired
        self._network = ipaddress.ip_network(network)
        self._leading, self._joining_in = _Turn(), _Turn()

    def lead(
        self, request: FetchSums, update: Vector, largest: float, children: Mapping[str, Channel]
    ) -> Vector:
        """Return the sum of ``update``, whose values are up to ``largest``, and those of the children over
        the divisor of ``request``; without repair over the weights that came. All of them keep it, too.
        Raises RemoteError if any is lost.
        """
        joins = {
            name: self._joining(request, number, name)
            for number, name in enumerate((request.node, *children))
        }
        for name, channel in children.items():
            channel.send(joins[name], Deadline.after(STALL_SECONDS))
        bounds = {request.node: largest}
        for name, channel in children.items():
            announced, given, most = expect(channel, RoundJoined).largest, request.unrepaired, LARGEST
            if given:
                most = most_of(given.weights, request.node, largest, name)
            bounds[name] = announced if given else request.bounds[name][1]
            if not 0 <= bounds[name] <= most:
                raise ProtocolError(f"{name} has announced values up to {bounds[name]:g}, and not {most:g}")
        # With repair all or none count, so one weight may be the whole divisor.
        whole = {request.node: request.divisor}
        weights = request.unrepaired.weights if request.unrepaired else whole
        heads = [ClientHead(join.key, weights.get(name, 0.0), bounds[name]) for name, join in joins.items()]
        return self._led(joins, heads, update, children)

    def lead_words(
        self, request: FetchWords, update: Vector, children: Mapping[str, Channel]
    ) -> tuple[Vector, dict[str, bytes]]:
        """Return the sum of the masked words of ``update`` and of those of the children, seen as float32, and
        the children's figures. Raises RemoteError if any is lost.
        """
        joins = {
            name: self._joining(request, number, name)
            for number, name in enumerate((request.node, *children))
        }
        for name, channel in children.items():
            channel.send(joins[name], Deadline.after(STALL_SECONDS))
        figures = {name: expect(channel, RoundJoined).figures for name, channel in children.items()}
        heads = [ClientHead(join.key, 0.0, LARGEST) for join in joins.values()]
        return self._led(joins, heads, update, children), figures

    def _led(
        self,
        joins: Mapping[str, JoinRound],
        heads: Sequence[ClientHead],
        update: Vector,
        children: Mapping[str, Channel],
    ) -> Vector:
        leaving = update  # until the mean is known: as many bytes
        try:
            leaving = self._aggregate(joins, heads, update)
        finally:
            for _ in children:
                self._passing(leaving.data.cast("B"))
        for channel in children.values():
            channel.expect(Ok, Deadline.after(round_seconds(update.nbytes)))
        return leaving

    def _aggregate(
        self, joins: Mapping[str, JoinRound], heads: Sequence[ClientHead], update: Vector
    ) -> Vector:
        own_join = next(iter(joins.values()))
        plan, allowed = _plan(own_join, update), round_seconds(update.nbytes)
        pool = ThreadPoolExecutor(1, "own update")
        try:
            own = pool.submit(self._exchange, own_join, update, leaves=False)
            with self._leading.taken() as abandoned:
                aggregate(
                    self._hub,
                    plan,
                    heads,
                    Deadline.after(allowed),
                    abandoned=abandoned,
                    repaired=self._repaired,
                )
            return own.result()
        except LostClients as error:
            names = list(joins)
            faults = "; ".join(f"{names[client]}: {fault}" for client, fault in error.lost.items())
            raise RemoteError(f"a round by datagrams: {faults}") from None
        finally:
            # An own update of a round that has failed waits until its deadline, or the next round.
            pool.shutdown(wait=False)

    def check(self, request: JoinRound, update: Vector) -> None:
        """Check a request for ``update``, which then passes the gate. Raises RemoteError."""
        if len(request.key) != KEY_SIZE or not 0 <= request.client < MOST_CLIENTS:
            raise ProtocolError(f"client {request.client} with a key of {len(request.key)} bytes")
        if request.port not in JOB_PORTS:  # the root tells its own
            raise ProtocolError(f"port {request.port} is no node's")
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(request.address) in self._network:
                self._passing(update.data.cast("B"))
                return
        raise ProtocolError(f"{request.address:.40} is not on the LAN {self._network}")

    def join(self, request: JoinRound, update: Vector) -> Vector:
        """Send ``update`` to the aggregator of a checked request, and return the mean. Raises RemoteError."""
        return self._exchange(request, update)

    def _exchange(self, request: JoinRound, update: Vector, *, leaves: bool = True) -> Vector:
        hub, deadline = (request.address, request.port), Deadline.after(round_seconds(update.nbytes))
        plan, client, key = _plan(request, update), request.client, request.key
        with self._joining_in.taken() as abandoned:
            done = exchange(
                self._own,
                hub,
                plan,
                client,
                key,
                update,
                deadline=deadline,
                weight=own_weight(request),
                abandoned=abandoned,
                repaired=self._repaired if leaves else ignore,
            )
        return done.mean

    def _joining(self, request: FetchSums | FetchWords, client: int, name: str) -> JoinRound:
        address, port = self._hub.getsockname()[:2]
        key, exchange = secrets.token_bytes(KEY_SIZE), request.exchange
        if isinstance(request, FetchWords):
            even = self._values // 2 * 2  # a datagram has no half of a word
            return JoinRound(exchange, address, port, client, key, even, bits=request.bits)
        return JoinRound(exchange, address, port, client, key, self._values, _own(request, name))


class _Turn:
    """Gives a socket to the newest round: one that nobody waits for any more ends."""

    def __init__(self) -> None:
        self._lock, self._abandoned = threading.Lock(), threading.Event()

    @contextlib.contextmanager
    def taken(self) -> Iterator[threading.Event]:
        """Have the turn, within a second or so. Yields the event that a later round sets."""
        self._abandoned.set()
        with self._lock:
            self._abandoned.clear()
            yield self._abandoned


def _plan(request: JoinRound, update: Vector) -> VectorPlan:
    try:
        repair = request.unrepaired is None
        return VectorPlan(
            request.exchange % _ROUNDS, len(update), request.values, repair=repair, words=request.bits
        )
    except ValueError as error:
        raise ProtocolError(f"a round by datagrams: {error}") from None


def _own(request: FetchSums, name: str) -> Unrepaired | None:
    """Return the part of a request without repair that one client needs."""
    given = request.unrepaired
    return None if given is None else Unrepaired({name: given.weights[name]}, given.added)


def own_weight(request: JoinRound) -> float:
    """Return the weight of a round's client, 1 with repair. Raises ProtocolError if it is none."""
    if request.unrepaired is None:
        return 1.0
    weights = tuple(request.unrepaired.weights.values())
    if len(weights) != 1 or not 0 < weights[0] < math.inf:
        raise ProtocolError("a round without repair is joined with a weight")
    return weights[0]


def round_seconds(size: int) -> float:
    """Return the time limit of a round of vectors of ``size`` bytes, of both directions."""
    return 2 * STALL_SECONDS + 2 * size / SLOWEST
