# SPDX-License-Identifier: Apache-2.0
"""Pure: what a side of the protocol wants to be sent, and the datagrams of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from millpond.aggregate.udp.datagrams import FROM_AGGREGATOR, Datagram, DatagramKind, seal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from millpond.aggregate.udp.arrivals import Arrivals
    from millpond.aggregate.udp.datagrams import VectorPlan

Address = Hashable
"""Of a socket, as the engine writes it."""


@dataclass(frozen=True, slots=True)
class SealedDatagram:
    """One datagram, ready to be sent."""

    address: Address
    content: bytes


@dataclass(frozen=True, slots=True)
class Train:
    """Datagrams with values, which the engine makes: those of ``indices``, numbered from ``sequence`` on, for
    the row ``row`` of the keys.
    """

    address: Address
    row: int
    indices: NDArray[np.uint32]
    sequence: int


Outgoing = SealedDatagram | Train


class RoundSide(Protocol):
    """A side of a round: an ``Aggregator`` or a ``Participant``."""

    plan: VectorPlan
    arrivals: Arrivals

    @property
    def finished(self) -> bool:
        """Whether nothing more is to be received."""

    def receive(self, datagram: bytes, address: Address, now: float, /) -> None:
        """Take a datagram."""

    def poll(self, now: float) -> list[Outgoing]:
        """Return what is to be sent now."""

    def sent(self, train: Train, count: int) -> None:
        """Account for the first ``count`` datagrams of a train."""

    def due(self, now: float) -> float | None:
        """Return when ``poll`` is to be called at the latest."""

    @property
    def repaired(self) -> int:
        """How many datagrams with values were sent beyond one for each block of each vector."""


def datagrams_of(side: RoundSide, train: Train, payload: Callable[[int], bytes]) -> Iterator[bytes]:
    """Return the datagrams of a train, with the values of ``payload(index)``."""
    arrivals = side.arrivals
    kind = DatagramKind.DATA | (arrivals.direction ^ FROM_AGGREGATOR)
    client, number = arrivals.first + train.row, side.plan.round
    for place, index in enumerate(train.indices.tolist()):
        sequence = train.sequence + place
        message = Datagram(kind, client, number, sequence, index, payload(index))
        yield seal(arrivals.keys[train.row], message)
