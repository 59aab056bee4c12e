# SPDX-License-Identifier: Apache-2.0
"""A network in memory with a clock of its own: it loses, repeats, delays and corrupts what is sent."""

from __future__ import annotations

import ctypes
import heapq
import random
import socket
import struct
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millpond.aggregate.exact import ExactSum, scale_of
from millpond.aggregate.udp.aggregator import Aggregator, ClientHead
from millpond.aggregate.udp.datagrams import RECEIVE_BUFFER, SEND_BUFFER, DatagramKind, VectorPlan
from millpond.aggregate.udp.outgoing import RoundSide, SealedDatagram, datagrams_of
from millpond.aggregate.udp.participant import Participant
from millpond.aggregate.udp.sums import BlockSums, ClientVectors
from millpond.linux.sockets import set_buffers

HUB = "aggregator"
DELAY = 0.0005
_SO_ATTACH_FILTER, _UDP_HEADER = 26, 8
_BYTE, _AND, _IF_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06
"""Instructions of a socket filter (BPF)."""
Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Faults:
    """How often what happens to a datagram, and how many seconds later than others one may come."""

    lost: float = 0.0
    repeated: float = 0.0
    corrupted: float = 0.0
    jitter: float = 0.0


def client_key(client: int) -> bytes:
    """Return the key that a client shares with the aggregator."""
    return bytes(range(client, client + 32))


def open_socket(address: tuple[str, int], receive_buffer: int = RECEIVE_BUFFER) -> socket.socket:
    """Return a UDP socket at ``address`` for either side."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    set_buffers(connection, receive_buffer, SEND_BUFFER)
    connection.bind(address)
    return connection


def lose_values(connection: socket.socket, places: Collection[tuple[int, int]]) -> None:
    """Let the kernel drop datagrams with values before ``connection`` has them: those of a client and an
    index, both below 256. Trains of the C engine are one packet on loopback: the peer must not be that.
    """
    left = 4 * len(places)
    program = [(_BYTE, 0, 0, _UDP_HEADER), (_AND, 0, 0, 7), (_IF_EQUAL, 0, left, DatagramKind.DATA)]
    for client, index in places:
        left -= 4
        program += [(_BYTE, 0, 0, _UDP_HEADER + 2), (_IF_EQUAL, 0, 2, client)]
        program += [(_BYTE, 0, 0, _UDP_HEADER + 12), (_IF_EQUAL, left + 1, 0, index)]
    program += [(_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    filter_ = struct.pack("@HP", len(program), ctypes.addressof(code))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)


def heads_of(vectors: Sequence[Vector]) -> list[ClientHead]:
    """Return what a control session would have said of them: the weights are 1, 2, 3 and so on."""
    return [
        ClientHead(client_key(client), 1.0 + client, float(np.abs(vector).max()))
        for client, vector in enumerate(vectors)
    ]


def exact_mean(vectors: Sequence[Vector], heads: Sequence[ClientHead], scale: float = 0.0) -> Vector:
    """Return the mean as ``ExactSum`` gives it over TCP."""
    total, mean = ExactSum(len(vectors[0])), np.empty(len(vectors[0]), np.float32)
    total.begin(scale or scale_of(max(head.largest for head in heads), len(heads)))
    for vector, head in zip(vectors, heads, strict=True):
        total.add(vector, bound=head.largest)
    total.divide(sum(head.weight for head in heads), mean)
    return mean


class FakeLink:
    """An aggregator and clients. A client is dead once it has sent ``lives[client]`` datagrams of values.
    With ``leaving`` a client hears nothing once it has the mean, as one whose call has returned.
    """

    def __init__(
        self,
        plan: VectorPlan,
        vectors: Sequence[Vector],
        heads: Sequence[ClientHead],
        faults: Faults = Faults(),
        *,
        seed: int = 0,
        lives: dict[int, int] | None = None,
        window: int = 64,
        stall: float = 5.0,
        deadline: float | None = None,
        leaving: bool = False,
    ) -> None:
        self.leaving, self.gone = leaving, set[int]()
        self.plan, self.faults, self.random, self.now = plan, faults, random.Random(seed), 1.0
        self.lives, self.sent = lives or {}, dict.fromkeys([HUB, *range(len(heads))], 0)
        self._queue: list[tuple[float, int, Hashable, Hashable, bytes]] = []
        self._order = 0
        self.sums = BlockSums(plan, heads)
        self.aggregator = Aggregator(
            plan,
            heads,
            self.sums,
            window=window,
            now=self.now,
            stall=stall,
            deadline=None if deadline is None else self.now + deadline,
        )
        self.vectors = [
            ClientVectors(plan, each, head.weight) for each, head in zip(vectors, heads, strict=True)
        ]
        self.participants = [
            Participant(plan, client, head.key, self.vectors[client], HUB, window=window, now=self.now)
            for client, head in enumerate(heads)
        ]

    def run(self, seconds: float = 200.0) -> None:
        """Go on until the aggregator has lost clients, or all are finished."""
        until = self.now + seconds
        while not self.finished:
            assert self.now < until, "the round does not end"
            self.step()

    @property
    def finished(self) -> bool:
        """Whether nobody waits for anything."""
        waiting = any(not each.finished for each in self.participants if self._lives(each))
        return bool(self.aggregator.lost) or (self.aggregator.finished and not waiting)

    def step(self) -> None:
        """Let all send, and go on to the next time at which something happens."""
        self._let_send(HUB, self.aggregator, self.sums)
        for each in self.participants:
            if self._lives(each):
                self._let_send(each.client, each, self.vectors[each.client])
                if self.leaving and each.finished:
                    self.gone.add(each.client)
        dues = [
            self.aggregator.due(self.now),
            *(each.due(self.now) for each in self.participants if self._lives(each)),
        ]
        times = [due for due in dues if due is not None] + [entry[0] for entry in self._queue[:1]]
        self.now = max(min(times, default=self.now), self.now + 1e-5)
        while self._queue and self._queue[0][0] <= self.now:
            _, _, sender, target, datagram = heapq.heappop(self._queue)
            self._deliver(sender, target, datagram)

    def put(self, sender: Hashable, target: Hashable, datagram: bytes) -> None:
        """Let a datagram arrive as it is."""
        self._order += 1
        later = DELAY + self.random.random() * self.faults.jitter
        heapq.heappush(self._queue, (self.now + later, self._order, sender, target, datagram))

    def _lives(self, each: Participant) -> bool:
        return each.client not in self.gone and self.sent[each.client] < self.lives.get(each.client, 1 << 60)

    def _let_send(self, name: Hashable, side: RoundSide, values: BlockSums | ClientVectors) -> None:
        for outgoing in side.poll(self.now):
            if isinstance(outgoing, SealedDatagram):
                self._transmit(name, outgoing.address, outgoing.content)
                continue
            left = len(outgoing.indices)
            if isinstance(side, Participant):
                left = min(left, self.lives.get(side.client, 1 << 60) - self.sent[side.client])
            for datagram in list(datagrams_of(side, outgoing, values.payload))[:left]:
                self._transmit(name, outgoing.address, datagram)
            self.sent[name] += left
            side.sent(outgoing, left)

    def _transmit(self, sender: Hashable, target: Hashable, datagram: bytes) -> None:
        if self.random.random() < self.faults.lost:
            return
        if self.random.random() < self.faults.corrupted:
            place = self.random.randrange(8 * len(datagram))
            changed = int.from_bytes(datagram, "little") ^ 1 << place
            datagram = changed.to_bytes(len(datagram), "little")
        for _ in range(2 if self.random.random() < self.faults.repeated else 1):
            self.put(sender, target, datagram)

    def _deliver(self, sender: Hashable, target: Hashable, datagram: bytes) -> None:
        if target != HUB:
            assert isinstance(target, int)
            if target not in self.gone:
                self.participants[target].receive(datagram, sender, self.now)
            return
        self.aggregator.receive(datagram, sender, self.now)
