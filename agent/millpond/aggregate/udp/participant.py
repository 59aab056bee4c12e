# SPDX-License-Identifier: Apache-2.0
"""Pure: a client's part of one round, without a socket: fed with datagrams and times, it says what to send
and when.
"""

from __future__ import annotations

import numpy as np

from millpond.aggregate.udp.aggregator import LONGEST_TRAIN
from millpond.aggregate.udp.arrivals import Arrivals, BlockSink
from millpond.aggregate.udp.datagrams import FROM_AGGREGATOR, Datagram, DatagramKind, VectorPlan, seal
from millpond.aggregate.udp.outgoing import Address, Outgoing, SealedDatagram, Train
from millpond.aggregate.udp.pacing import WIRE_OVERHEAD, Pacer
from millpond.aggregate.udp.receiving import RATE_UNIT, IncomingStream, Word
from millpond.aggregate.udp.sending import OutgoingStream

_LAST_WORDS = 8
"""How often the last word is said: the client waits for no answer to it, and an aggregator that hears none of
them gives the round up. Where a fifth of all datagrams is lost, that is one round in 400,000.
"""
_OF_MEAN = (DatagramKind.START, DatagramKind.PROBE, DatagramKind.END)


class Participant:
    """One round. ``client`` is its number, ``key`` its own; ``window`` the datagrams that its receive buffer
    holds.
    """

    def __init__(
        self,
        plan: VectorPlan,
        client: int,
        key: bytes,
        sink: BlockSink,
        aggregator: Address,
        *,
        window: int,
        now: float,
    ) -> None:
        self.plan, self.client, self.key = plan, client, key
        self._sink, self._aggregator = sink, aggregator
        self.arrivals = Arrivals(plan, [key], client, reverse=True)
        self.incoming = IncomingStream(self.arrivals, 0)
        order = np.arange(plan.blocks, dtype=np.uint32)
        self.outgoing = OutgoingStream(plan, order, plan.blocks, closed=True)
        self._pacer, self._window = Pacer(plan.datagram + WIRE_OVERHEAD), window
        self._words: list[Outgoing] = []
        self.outgoing.start(now)

    @property
    def finished(self) -> bool:
        """Whether the client has the mean; ``poll`` may still return last words."""
        return self.incoming.ended

    def receive(self, datagram: bytes, _address: Address, _now: float) -> None:
        """Take a datagram. What is not the aggregator's, or of another round, is counted alone; where it came
        from does not matter.
        """
        message = self.arrivals.open(datagram)
        if message is None:
            return
        if message.kind == FROM_AGGREGATOR | DatagramKind.DATA:
            self.arrivals.take(message, self._sink)
            return
        self.arrivals.count("control")
        kind = message.kind & 7
        if kind in _OF_MEAN:
            for word in self.incoming.hear(message, (self._window, 0.0)):
                self._say(word, _LAST_WORDS if word[0] == DatagramKind.ENDED else 1)
            self.arrivals.closed = self.incoming.ended
        else:
            if kind == DatagramKind.GRANT:
                self._pacer.set_rate(message.index * RATE_UNIT)
            self.outgoing.hear(message)

    def poll(self, now: float) -> list[Outgoing]:
        """Return what is to be sent now. Of each train ``sent`` says how many datagrams went out."""
        for word in self.incoming.next_grants((self._window, 0.0)):
            self._say(word)
        if control := self.outgoing.control(now):
            self._say((*control, self.plan.pack() if control[0] == DatagramKind.START else b""))
        size = self.plan.datagram + WIRE_OVERHEAD
        indices = self.outgoing.next(int(min(self._pacer.allowance(now) / size, LONGEST_TRAIN)))
        words, self._words = self._words, []
        if len(indices):
            words.append(Train(self._aggregator, 0, indices, self.outgoing.sequence))
        return words

    def sent(self, train: Train, count: int) -> None:  # noqa: ARG002 - there is one stream
        """Account for the first ``count`` datagrams of a train."""
        self.outgoing.sent(count)
        self._pacer.spend(count * (self.plan.datagram + WIRE_OVERHEAD))

    @property
    def repaired(self) -> int:
        """How many datagrams with values were sent beyond one for each block of the vector."""
        return self.outgoing.repaired

    def due(self, now: float) -> float | None:
        """Return when ``poll`` is to be called at the latest, None for not before something has come."""
        if len(self.outgoing.next(1)):
            return self._pacer.due(now)
        return self.outgoing.due()

    def _say(self, word: Word, times: int = 1) -> None:
        kind, sequence, index, payload = word
        message = Datagram(kind, self.client, self.plan.round, sequence, index, payload)
        self._words += [SealedDatagram(self._aggregator, seal(self.key, message))] * times
