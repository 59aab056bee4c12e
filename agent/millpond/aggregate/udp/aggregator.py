# SPDX-License-Identifier: Apache-2.0
"""Pure: the aggregator of one round, without a socket: fed with datagrams and times, it says what to send and
when.

*Parts of the mean* go out as soon as all clients' values of them have come, while others still come in: what
all have sent is final. Where datagrams may stay lost, the rest goes out when all clients have ended.

*A client without END leaves no trace.* Its values are in the totals, and nobody can subtract them but by
sending them again; to keep each client's values apart would take a model for each. But the other clients hold
their vectors until they have the mean. So the round begins anew without the lost client, as ``reduction``
does over TCP, and the bits are those of a round that never had it. ``revision`` counts these beginnings, in
each datagram, so that a client takes no part of a mean that no longer holds. A client that has sent no values
costs nothing.
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
from millpond.aggregate.udp.pacing import WIRE_OVERHEAD, Pacer
from millpond.aggregate.udp.receiving import Credit, IncomingStream, Word
from millpond.aggregate.udp.sending import OutgoingStream

if TYPE_CHECKING:
    from numpy.typing import NDArray

STALL_SECONDS = 5.0
"""Time without a datagram of a client, after which it is lost."""
LONGEST_TRAIN = 88
"""Datagrams of a train: so many go to one client before the next one's turn."""
_BURST_SECONDS = 0.05
"""Longer than of a client: a burst is divided among the ports of the switch."""
_SOLICIT_SECONDS = 0.05
_SLOWEST = 1e6
"""Bytes per second of the mean's way to all clients, once all have sent their values, beside two stalls."""
_MOST_REVISIONS = 255


@dataclass(frozen=True, slots=True)
class ClientHead:
    """A client of a round, as the control session knows it: its key, its ``weight`` in the divisor, and the
    bound of its values.
    """

    key: bytes
    weight: float
    largest: float


class MeanSums(BlockSink, Protocol):
    """The sums of a round."""

    def scale(self, active: NDArray[np.uint8]) -> float:
        """Return the scale of a sum of the active clients' values."""

    def begin(self, active: NDArray[np.uint8]) -> None:
        """Begin new sums of the active clients' values, to be divided by all these clients' weights."""

    def weigh(self, active: NDArray[np.uint8]) -> None:
        """Divide all sums by the weights of the active clients."""

    def divide_by(self, index: int, clients: NDArray[np.bool_]) -> None:
        """Divide the sums of a datagram by other weights: those of ``clients``."""


class Aggregator:
    """One round. ``rate`` is the receiver's and sender's share of the LAN in bytes per second, 0 to measure
    what comes and not to pace what goes; ``window`` the datagrams that its receive buffer holds; ``deadline``
    the time at which clients that have not ended are left out.
    """

    def __init__(
        self,
        plan: VectorPlan,
        clients: Sequence[ClientHead],
        sums: MeanSums,
        *,
        window: int,
        now: float,
        rate: float = 0.0,
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
        self.unconfirmed: set[int] = set()
        self._addresses: dict[int, Address] = {}
        self._heard, self._seen = [now] * len(clients), self.arrivals.seen.copy()
        self._credit, self._pacer = (
            Credit(plan, window, rate),
            Pacer(plan.datagram + WIRE_OVERHEAD, rate, _BURST_SECONDS),
        )
        self._stall, self._deadline, self._solicit, self._turn = stall, deadline, 0.0, 0
        self._given_up = math.inf
        self._words: list[Outgoing] = []
        self._received = 0
        sums.begin(self.arrivals.active)

    @property
    def present(self) -> list[int]:
        """The clients that are not lost."""
        return np.flatnonzero(self.arrivals.active).tolist()

    @property
    def finished(self) -> bool:
        """Whether all clients that are present have the mean, or cannot be reached any more."""
        return all(self.outgoing[row].done or row in self.unconfirmed for row in self.present)

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
        if message.revision != self.arrivals.revision:
            if message.kind in (DatagramKind.START, DatagramKind.PROBE, DatagramKind.END):
                self._say(row, (DatagramKind.GRANT, 0, 0, b""))
        elif message.kind in (DatagramKind.START, DatagramKind.PROBE, DatagramKind.END):
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
        for row in self.present:
            if row not in self.unconfirmed:
                self._grant_and_solicit(row, share, now)
                self._mean_words(row, now)
        if now >= self._solicit:
            self._solicit = now + _SOLICIT_SECONDS
        words, self._words = self._words, []
        return [*words, *self._trains(now)]

    @property
    def repaired(self) -> int:
        """How many datagrams with values were sent beyond one for each block of the mean and each client."""
        return sum(stream.repaired for stream in self.outgoing)

    def sent(self, train: Train, count: int) -> None:
        """Account for the first ``count`` datagrams of a train."""
        self.outgoing[train.row].sent(count)
        self._pacer.spend(count * (self.plan.datagram + WIRE_OVERHEAD))

    def due(self, now: float) -> float:
        """Return when ``poll`` is to be called at the latest, if nothing comes before."""
        times = [self._given_up if self._deadline is None else self._deadline]
        for row in self.present:
            if row in self.unconfirmed:
                continue
            stream, silent = self.outgoing[row], not self.incoming[row].ended
            if len(stream.next(1)):
                times.append(self._pacer.due(now))
            if (due := stream.due()) is not None:
                times.append(due)
            if silent or stream.unanswered:
                times.append(self._patience(row))
            if silent and self.arrivals.revision and not self.incoming[row].started:
                times.append(self._solicit)
        return min(times, default=now)

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
        return self._credit.share(sum(not self.incoming[row].ended for row in self.present))

    def _lose(self, now: float) -> None:
        """Leave out clients that are silent, late, or send what they must not."""
        faults: dict[int, str] = {}
        late = self._deadline is not None and now >= self._deadline
        for row in self.present:
            if self.arrivals.beyond[row]:
                faults[row] = "its values are beyond those it has announced"
            elif self.incoming[row].ended:
                silent = self.outgoing[row].unanswered and now >= self._patience(row)
                if not self.outgoing[row].done and (silent or now >= self._given_up):
                    self.unconfirmed.add(row)
            elif late:
                faults[row] = "its values have not come by the deadline"
            elif now >= self._patience(row):
                faults[row] = f"no datagram came for {self._stall:g} s"
        if late:
            self._deadline = None
        if faults:
            self._exclude(faults, now)

    def _patience(self, row: int) -> float:
        """Return the time at which a client is lost if nothing comes from it."""
        stream, ended = self.outgoing[row], self.incoming[row].ended
        return max(self._heard[row], stream.since if ended else 0.0) + self._stall

    def _exclude(self, faults: dict[int, str], now: float) -> None:
        arrivals, traces = self.arrivals, any(self.arrivals.received[row] for row in faults)
        before = self._sums.scale(arrivals.active)
        self.lost |= faults
        for row in faults:
            arrivals.exclude(row)
        if not self.present:
            return
        if not traces and self._sums.scale(arrivals.active) == before:
            self._sums.weigh(arrivals.active)
            whole = np.flatnonzero(arrivals.counts == arrivals.present)
            arrivals.whole[: len(whole)], arrivals.whole_count[0] = whole, len(whole)
            return
        if arrivals.revision == _MOST_REVISIONS:
            self.lost |= dict.fromkeys(self.present, "too many clients were lost one after the other")
            arrivals.active[:] = 0
            return
        self._begin_anew(now)

    def _begin_anew(self, now: float) -> None:
        self.arrivals.begin(self.arrivals.revision + 1)
        self._sums.begin(self.arrivals.active)
        self._seen[:], self._solicit, self._words = 0, 0.0, []
        self._heard = [now] * len(self.clients)
        for incoming, outgoing in zip(self.incoming, self.outgoing, strict=True):
            incoming.reset()
            outgoing.reset()

    def _close(self, now: float) -> None:
        """Divide what not all clients have sent, when no more of it can come."""
        if self.arrivals.closed or not all(self.incoming[row].ended for row in self.present):
            return
        arrivals, active = self.arrivals, self.arrivals.active.astype(bool)
        for index in arrivals.incomplete().tolist():
            if arrivals.counts[index]:
                self._sums.divide_by(index, arrivals.has(index) & active)
                arrivals.whole[arrivals.whole_count[0]] = index
                arrivals.whole_count[0] += 1
        arrivals.closed = True
        self._given_up = now + 2 * self._stall + 4 * self.plan.size * len(self.present) / _SLOWEST

    def _grant_and_solicit(self, row: int, share: tuple[int, float], now: float) -> None:
        stream = self.incoming[row]
        for word in stream.next_grants(share):
            self._say(row, word)
        if self.arrivals.revision and not stream.started and now >= self._solicit:
            self._say(row, (DatagramKind.GRANT, 0, 0, b""))

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
            revision, number = self.arrivals.revision, self.plan.round
            message = Datagram(kind | FROM_AGGREGATOR, revision, row, number, sequence, index, payload)
            self._words.append(SealedDatagram(self._addresses[row], seal(self.clients[row].key, message)))

    def _trains(self, now: float) -> list[Outgoing]:
        """Return one train for each client in turn, as far as the pace allows."""
        size = self.plan.datagram + WIRE_OVERHEAD
        left, present, trains = self._pacer.allowance(now), self.present, list[Outgoing]()
        turn = self._turn % len(present) if present else 0
        for row in present[turn:] + present[:turn]:
            most = 0 if row in self.unconfirmed else int(min(left / size, LONGEST_TRAIN))
            indices = self.outgoing[row].next(most)
            if len(indices):
                trains.append(Train(self._addresses[row], row, indices.copy(), self.outgoing[row].sequence))
                left -= len(indices) * size
                self._turn = row + 1
        return trains
