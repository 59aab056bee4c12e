# SPDX-License-Identifier: Apache-2.0
"""Pure: the aggregator of one round, without a socket: fed with datagrams and times, it says what to send and
when.

*Parts of the mean* go out as soon as all clients' values of them have come, while others still come in: what
all have sent is final. Without repair, the rest goes out when all clients have ended, each part divided by
the weights of the clients whose values of it have come; what nobody has sent stays out.

*All clients count, or the round fails*: the values of a client that is lost are in the totals, and nobody can
subtract them but by sending them again; to keep each client's values apart would take a model for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from millpond.aggregate.udp.arrivals import Arrivals, BlockSink
from millpond.aggregate.udp.datagrams import (
    FROM_AGGREGATOR,
    MOST_CLIENTS,
    Datagram,
    DatagramKind,
    VectorPlan,
    seal,
)
from millpond.aggregate.udp.outgoing import Address, Outgoing, SealedDatagram, Train
from millpond.aggregate.udp.receiving import Credit, IncomingStream, Word
from millpond.aggregate.udp.sending import OutgoingStream
from millpond.base.sizes import SLOWEST

if TYPE_CHECKING:
    from numpy.typing import NDArray

STALL_SECONDS = 5.0
"""Time without a datagram of a client, after which it is lost."""
LONGEST_TRAIN = 88
"""Datagrams of a train: so many go to one client before the next one's turn."""


@dataclass(frozen=True, slots=True)
class ClientHead:
    """A client of a round, as the control session knows it: its key, its ``weight`` in the divisor, and the
    bound of its values.
    """

    key: bytes
    weight: float
    largest: float


class MeanSums(BlockSink, Protocol):
    """The sums of a round, each divided by the weights of all clients unless ``divide_by`` says otherwise."""

    def divide_by(self, index: int, clients: NDArray[np.bool_]) -> None:
        """Divide the sums of a datagram by the weights of ``clients``."""


class Aggregator:
    """One round. ``window`` are the datagrams that its receive buffer holds; ``deadline`` the time at which
    clients that have not ended are lost. The first ``lost`` clients, with the reason, end the round.
    """

    def __init__(
        self,
        plan: VectorPlan,
        clients: Sequence[ClientHead],
        sums: MeanSums,
        *,
        window: int,
        now: float,
        stall: float = STALL_SECONDS,
        deadline: float | None = None,
    ) -> None:
        if not 0 < len(clients) <= MOST_CLIENTS:
            raise ValueError(f"a round has 1 to {MOST_CLIENTS} clients, not {len(clients)}")
        self.plan, self.clients, self._sums = plan, tuple(clients), sums
        self.arrivals = Arrivals(plan, [each.key for each in clients])
        self.incoming = [IncomingStream(self.arrivals, row, in_order=True) for row in range(len(clients))]
        self.outgoing = [OutgoingStream(plan, self.arrivals.whole) for _ in clients]
        self.lost: dict[int, str] = {}
        self._addresses: dict[int, Address] = {}
        self._heard, self._seen = [now] * len(clients), self.arrivals.seen.copy()
        self._credit = Credit(plan, window)
        self._stall, self._deadline, self._turn = stall, math.inf if deadline is None else deadline, 0
        self._given_up = math.inf
        self._words: list[Outgoing] = []
        self._received = 0

    @property
    def finished(self) -> bool:
        """Whether all clients have the mean, or some are lost."""
        return bool(self.lost) or all(stream.done for stream in self.outgoing)

    def receive(self, datagram: bytes, address: Address, now: float) -> None:
        """Take a datagram that came from ``address``. What is not a client's, or of another round, is counted
        alone.
        """
        message = self.arrivals.open(datagram)
        if message is None:
            return
        row = message.client
        self._addresses.setdefault(row, address)  # a copy from elsewhere must not turn the mean away
        self._heard[row] = now
        if message.kind == DatagramKind.DATA:
            self.arrivals.take(message, self._sums)
            return
        self.arrivals.count("control")
        if message.kind in (DatagramKind.START, DatagramKind.PROBE, DatagramKind.END):
            for word in self.incoming[row].hear(message, self._share()):
                self._say(row, word)
        else:
            self.outgoing[row].hear(message)

    def poll(self, now: float) -> list[Outgoing]:
        """Return what is to be sent now. Of each train ``sent`` says how many datagrams went out."""
        self._notice(now)
        self._lose(now)
        self._close(now)
        share = self._share()
        for row, stream in enumerate(self.incoming):
            for word in stream.next_grants(share):
                self._say(row, word)
            self._mean_words(row, now)
        words, self._words = self._words, []
        return [*words, *self._trains()]

    @property
    def repaired(self) -> int:
        """How many datagrams with values were sent beyond one for each block of the mean and each client."""
        return sum(stream.repaired for stream in self.outgoing)

    def sent(self, train: Train, count: int) -> None:
        """Account for the first ``count`` datagrams of a train."""
        self.outgoing[train.row].sent(count)

    def due(self, now: float) -> float:
        """Return when ``poll`` is to be called at the latest, if nothing comes before."""
        times = [min(self._deadline, self._given_up)]
        for row, stream in enumerate(self.outgoing):
            if len(stream.next(1)):
                times.append(now)
            if (due := stream.due()) is not None:
                times.append(due)
            if not self.incoming[row].ended or stream.unanswered:
                times.append(self._patience(row))
        return min(times)

    def _notice(self, now: float) -> None:
        """Note which clients' data has come; the C engine does not say."""
        arrivals = self.arrivals
        for row in np.flatnonzero(arrivals.seen != self._seen).tolist():
            self._heard[row] = now
        self._seen[:] = arrivals.seen
        received = int(arrivals.counters[0])
        if received != self._received:
            self._credit.arrived(received - self._received, now)
            self._received = received

    def _share(self) -> tuple[int, float]:
        return self._credit.share(sum(not stream.ended for stream in self.incoming))

    def _lose(self, now: float) -> None:
        """Lose clients that are silent, late, or send what they must not."""
        for row, stream in enumerate(self.outgoing):
            silent = now >= self._patience(row)
            if self.arrivals.beyond[row]:
                self.lost[row] = "its values are beyond those it has announced"
            elif self.incoming[row].ended:
                if not stream.done and ((stream.unanswered and silent) or now >= self._given_up):
                    self.lost[row] = "it does not confirm the mean"
            elif now >= self._deadline:
                self.lost[row] = "its values have not come by the deadline"
            elif silent:
                self.lost[row] = f"no datagram came for {self._stall:g} s"

    def _patience(self, row: int) -> float:
        """Return the time at which a client is lost if nothing comes from it."""
        stream, ended = self.outgoing[row], self.incoming[row].ended
        return max(self._heard[row], stream.since if ended else 0.0) + self._stall

    def _close(self, now: float) -> None:
        """Begin to wait for the mean's way out, when no more can come in."""
        if self.arrivals.closed or not all(stream.ended for stream in self.incoming):
            return
        self._divide_incomplete()
        self.arrivals.closed = True
        self._deadline = math.inf
        size = 4 * self.plan.size * len(self.clients)
        self._given_up = now + 2 * self._stall + size / SLOWEST

    def _divide_incomplete(self) -> None:
        """Divide what not all clients have sent by the weights of those that have."""
        arrivals = self.arrivals
        for index in arrivals.incomplete().tolist():
            if arrivals.counts[index]:
                self._sums.divide_by(index, arrivals.has(index))
                arrivals.whole[arrivals.whole_count[0]] = index
                arrivals.whole_count[0] += 1

    def _mean_words(self, row: int, now: float) -> None:
        stream = self.outgoing[row]
        stream.ready, stream.closed = int(self.arrivals.whole_count[0]), self.arrivals.closed
        if stream.ready or stream.closed:
            stream.start(now)
        if word := stream.control(now):
            self._say(row, (*word, self.plan.pack() if word[0] == DatagramKind.START else b""))

    def _say(self, row: int, word: Word) -> None:
        if row in self._addresses:
            kind, sequence, index, payload = word
            message = Datagram(kind | FROM_AGGREGATOR, row, self.plan.round, sequence, index, payload)
            self._words.append(SealedDatagram(self._addresses[row], seal(self.clients[row].key, message)))

    def _trains(self) -> list[Outgoing]:
        """Return one train for each client in turn."""
        count, trains = len(self.clients), list[Outgoing]()
        turn = self._turn % count
        for row in (*range(turn, count), *range(turn)):
            indices = self.outgoing[row].next(LONGEST_TRAIN)
            if len(indices):
                trains.append(Train(self._addresses[row], row, indices.copy(), self.outgoing[row].sequence))
                self._turn = row + 1
        return trains
