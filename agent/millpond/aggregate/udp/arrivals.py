# SPDX-License-Identifier: Apache-2.0
"""Pure: what has arrived of the vectors of one or many senders, in arrays that the C engine writes, too.

Each (sender, index) counts once. Lengths and round are checked before the tag, and the tag before
any value is used; nothing is buffered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from millpond.aggregate.udp.datagrams import (
    FROM_AGGREGATOR,
    KEY_SIZE,
    LARGEST_SEQUENCE,
    OVERHEAD,
    Datagram,
    DatagramKind,
    VectorPlan,
    is_genuine,
    parse,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from millpond.aggregate.kernels import Vector

COUNTERS = (
    "accepted",
    "control",
    "malformed",
    "client",
    "round",
    "tag",
    "length",
    "duplicate",
    "late",
)
"""What happened to datagrams: the names of ``Arrivals.counters``, in the order of engine.c."""
_COUNTER = {name: place for place, name in enumerate(COUNTERS)}


class BlockSink(Protocol):
    """Where the values of datagrams go."""

    def take(self, row: int, index: int, values: Vector) -> bool:
        """Take a datagram's values. Returns whether they are within the sender's bound."""


class Arrivals:
    """Holds what has come of the senders with the numbers from ``first`` on, one for each key. ``reverse`` is
    for a client, which takes what an aggregator sends.
    """

    def __init__(
        self, plan: VectorPlan, keys: Sequence[bytes], first: int = 0, *, reverse: bool = False
    ) -> None:
        if any(len(key) != KEY_SIZE for key in keys):
            raise ValueError(f"a client's key has {KEY_SIZE} bytes")
        rows = len(keys)
        self.plan, self.keys, self.first = plan, tuple(keys), first
        self.closed = False  # takes no more values: they are being used
        self.direction = FROM_AGGREGATOR if reverse else 0
        self.bits = np.zeros((rows, -(-plan.blocks // 8)), np.uint8)
        self.beyond = np.zeros(rows, np.uint8)  # whether it has sent a value beyond its bound
        self.received = np.zeros(rows, np.uint32)
        self.seen = np.zeros(rows, np.uint32)  # the highest sequence number, plus one
        self.counts = np.zeros(plan.blocks, np.uint32)
        self.whole = np.zeros(plan.blocks, np.uint32)  # the indices that all rows have sent
        self.whole_count = np.zeros(1, np.uint32)
        self.counters = np.zeros(len(COUNTERS), np.uint64)

    def count(self, name: str) -> None:
        """Count what happened to a datagram."""
        self.counters[_COUNTER[name]] += 1

    def counted(self) -> dict[str, int]:
        """Return all counters by name."""
        return dict(zip(COUNTERS, self.counters.tolist(), strict=True))

    def open(self, datagram: bytes) -> Datagram | None:
        """Return what a datagram says that is of this round and from a sender."""
        message, fault = parse(datagram), ""
        if message is None or (message.kind & FROM_AGGREGATOR) != self.direction:
            fault = "malformed"
        elif not 0 <= message.client - self.first < len(self.keys):
            fault = "client"
        elif message.round != self.plan.round:
            fault = "round"
        elif message.kind == self.direction | DatagramKind.DATA and (wrong := self._is_wrong(message)):
            fault = wrong
        elif not is_genuine(self.keys[message.client - self.first], datagram):
            fault = "tag"
        if fault:
            self.count(fault)
            return None
        return message

    def _is_wrong(self, message: Datagram) -> str:
        if self.closed:
            return "late"
        plan = self.plan
        fits = message.index < plan.blocks and len(message.payload) == 4 * plan.length(message.index)
        return "" if fits else "length"

    def take(self, message: Datagram, sink: BlockSink) -> None:
        """Take the values of a datagram that ``open`` returned."""
        row, index = message.client - self.first, message.index
        self.seen[row] = max(int(self.seen[row]), min(message.sequence + 1, LARGEST_SEQUENCE))
        if self.bits[row, index >> 3] >> (index & 7) & 1:
            self.count("duplicate")
            return
        self.bits[row, index >> 3] |= 1 << (index & 7)
        if not sink.take(row, index, np.frombuffer(message.payload, "<f4")):
            self.beyond[row] = 1
        self.count("accepted")
        self.received[row] += 1
        self.counts[index] += 1
        if self.counts[index] == len(self.keys):
            self.whole[self.whole_count[0]] = index
            self.whole_count[0] += 1

    def missing(self, row: int) -> NDArray[np.uint8]:
        """Return the bitmap of what has not arrived from a sender, with whole bytes."""
        found: NDArray[np.uint8] = ~self.bits[row]
        if over := self.plan.blocks & 7:
            found[-1] &= (1 << over) - 1
        return found

    def is_whole(self, row: int) -> bool:
        """Return whether everything has arrived from a sender."""
        return int(self.received[row]) == self.plan.blocks

    def incomplete(self) -> NDArray[np.intp]:
        """Return the indices that not all senders have sent."""
        return np.flatnonzero(self.counts < len(self.keys))

    def has(self, index: int) -> NDArray[np.bool_]:
        """Return which senders' values of an index have arrived."""
        return (self.bits[:, index >> 3] >> (index & 7) & 1) > 0


def bitmap_size(plan: VectorPlan) -> int:
    """Return how many bytes of a bitmap one MISSING carries: as large as a datagram with values."""
    return max(plan.datagram - OVERHEAD, 64)
