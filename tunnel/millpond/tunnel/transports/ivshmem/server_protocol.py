# SPDX-License-Identifier: Apache-2.0
"""Pure: implement the protocol between QEMU's ivshmem device and its server, version 0, for both sides.

The server sends, clients only receive. A message is a signed 64-bit little endian number; some carry a
descriptor. A client receives, in this order:

| number      | descriptor | means                                                                    |
|-------------|------------|--------------------------------------------------------------------------|
| 0           |            | version of the protocol                                                  |
| its own ID  |            | 0 to 65535                                                               |
| -1          | memory     | the shared memory                                                        |
| another ID  | eventfd    | what to write to for that peer's vector 0; again for vector 1, and so on |
| its own ID  | eventfd    | what its vector 0 is read from; again for vector 1, and so on            |

and then other IDs: with descriptors for a peer that has come, without for one that has left.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from millpond.base.errors import ProtocolError

PROTOCOL_VERSION = 0
MEMORY = -1
PEERS = 1 << 16
NUMBER = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class ServerMessage:
    """One number and the descriptor that goes with it, if any."""

    number: int
    descriptor: int | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message for the peer ``to``."""

    to: int
    message: ServerMessage


class Switchboard:
    """The server's side: the peers, and the messages to each. Descriptors are only numbers here."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._peers: dict[int, tuple[int, ...]] = {}
        self._next = 0

    def join(self, vectors: Sequence[int]) -> tuple[int, list[Delivery]]:
        """Add a peer with these eventfds; returns its ID and the messages to all peers. Raises
        ProtocolError.
        """
        if len(self._peers) == PEERS:
            raise ProtocolError("there are 65536 peers already")
        own = self._free_id()
        deliveries = [Delivery(own, ServerMessage(number)) for number in (PROTOCOL_VERSION, own)]
        deliveries.append(Delivery(own, ServerMessage(MEMORY, self._memory)))
        for peer, theirs in self._peers.items():
            deliveries += [Delivery(own, ServerMessage(peer, vector)) for vector in theirs]
            deliveries += [Delivery(peer, ServerMessage(own, vector)) for vector in vectors]
        deliveries += [Delivery(own, ServerMessage(own, vector)) for vector in vectors]
        self._peers[own] = tuple(vectors)
        return own, deliveries

    def leave(self, peer: int) -> list[Delivery]:
        """Remove a peer; returns the messages to the others."""
        del self._peers[peer]
        return [Delivery(other, ServerMessage(peer)) for other in self._peers]

    def _free_id(self) -> int:
        """Return an ID that was not in use a moment ago: a late notification must not reach another peer."""
        while self._next in self._peers:
            self._next = (self._next + 1) % PEERS
        found, self._next = self._next, (self._next + 1) % PEERS
        return found


class Roster:
    """The client's side: processes messages, knows its own ID and the other peers.

    A peer is known once ``vectors`` of its descriptors have come. Descriptors of no more use gather in
    ``unused``, for the caller to close.
    """

    def __init__(self, vectors: int) -> None:
        self._vectors = vectors
        self._version: int | None = None
        self._peers: dict[int, list[int]] = {}
        self.position: int | None = None
        self.memory: int | None = None
        self.wakes: list[int] = []
        self.unused: list[int] = []

    @property
    def complete(self) -> bool:
        """Whether the client itself has received all that it needs."""
        return len(self.wakes) == self._vectors

    @property
    def peers(self) -> dict[int, tuple[int, ...]]:
        """The known peers and the eventfds that notify each, by vector."""
        return {
            peer: tuple(vectors) for peer, vectors in self._peers.items() if len(vectors) == self._vectors
        }

    def release(self) -> list[int]:
        """Take all descriptors, for the caller to close, when the client has left."""
        held = [*self.unused, *self.wakes, *([] if self.memory is None else [self.memory])]
        held += [vector for vectors in self._peers.values() for vector in vectors]
        self.unused, self.wakes, self.memory, self._peers = [], [], None, {}
        return held

    def take(self, message: ServerMessage) -> None:
        """Process a message of the server. Raises ProtocolError."""
        if self._version is None or self.position is None:
            self._take_start(message)
        elif self.memory is None:
            if message.number != MEMORY or message.descriptor is None:
                raise ProtocolError(f"the doorbell server sent {message.number} instead of its memory")
            self.memory = message.descriptor
        elif not 0 <= message.number < PEERS:
            raise ProtocolError(f"the doorbell server announced a peer {message.number}")
        elif message.descriptor is None:
            self.unused += self._peers.pop(message.number, [])
        else:
            self._take_vector(message.number, message.descriptor)

    def _take_start(self, message: ServerMessage) -> None:
        if message.descriptor is not None:
            self.unused.append(message.descriptor)
            raise ProtocolError("the doorbell server sent a descriptor before the client's ID")
        if self._version is None:
            if message.number != PROTOCOL_VERSION:
                raise ProtocolError(f"the doorbell server speaks version {message.number}, not 0")
            self._version = message.number
        elif 0 <= message.number < PEERS:
            self.position = message.number
        else:
            raise ProtocolError(f"the doorbell server gave this client the ID {message.number}")

    def _take_vector(self, peer: int, descriptor: int) -> None:
        known = self.wakes if peer == self.position else self._peers.setdefault(peer, [])
        (known if len(known) < self._vectors else self.unused).append(descriptor)
