# SPDX-License-Identifier: Apache-2.0
"""Pure: the datagrams of a round, and their tags; ``docs/explanation/udp-aggregation.md`` has their layout.

The tag is keyed BLAKE2b of header and digest of the payload, not of the payload itself: an aggregator hashes
a part of the mean once, and then seals it for each client with one block of work.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

VERSION = 1
KEY_SIZE, TAG_SIZE, DIGEST_SIZE = 32, 16, 32
HEADER = struct.Struct("<BBHIII")
OVERHEAD = HEADER.size + TAG_SIZE
_IP_HEADERS = 20 + 8
"""Bytes of the headers of IPv4 and UDP: a LAN of devices has no other addresses."""
LARGEST_DATAGRAM = 65507
RECEIVE_BUFFER, SEND_BUFFER = 8 << 20, 1 << 20
"""Bytes of a socket's buffers that rounds want."""
MOST_CLIENTS = 1 << 16
MOST_BLOCKS = 1 << 31
LARGEST_SEQUENCE = (1 << 32) - 1
EARLY = LARGEST_SEQUENCE
"""The pass of a MISSING that comes before the END."""
FROM_AGGREGATOR = 8
"""The bit of a kind that tells the directions apart, so that no datagram is taken for one of its receiver's
own.
"""
_PLAN = struct.Struct("<QII")


class DatagramKind(IntEnum):
    """Kinds of datagrams. Of the sender's own vector: START, PROBE, END and DATA; of the peer's: GRANT,
    ENDED and MISSING.
    """

    START = 1
    GRANT = 2
    PROBE = 3
    END = 4
    ENDED = 5
    MISSING = 6
    DATA = 7


@dataclass(frozen=True, slots=True)
class VectorPlan:
    """Facts that both sides know of a round before its first datagram: its number, the ``size`` of all
    vectors, how many values a datagram carries, and whether missing ones are sent again. Values may be
    ``words`` of so many bits, or their halves, which are added as such. Raises ValueError.
    """

    round: int
    size: int
    values: int = 360
    repair: bool = True
    words: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.round < 1 << 32:
            raise ValueError(f"round {self.round} does not fit in 32 bits")
        if not 0 < 4 * self.values <= LARGEST_DATAGRAM - OVERHEAD:
            raise ValueError(f"{self.values} values do not fit in a datagram")
        if self.words == 64 and (self.size % 2 or self.values % 2):
            raise ValueError("a datagram has a half of a word")
        if not 0 < self.size <= MOST_BLOCKS * self.values:
            raise ValueError(f"a vector of {self.size} values is empty or has too many datagrams")

    @property
    def blocks(self) -> int:
        """How many datagrams hold a vector."""
        return -(-self.size // self.values)

    @property
    def datagram(self) -> int:
        """The bytes of a datagram with all its values."""
        return OVERHEAD + 4 * self.values

    def length(self, index: int) -> int:
        """How many values the datagram ``index`` holds."""
        return min(self.values, self.size - index * self.values)

    def pack(self) -> bytes:
        """Return the payload of a START, by which the peer sees that it is meant."""
        return _PLAN.pack(self.size, self.values, self.repair)


@dataclass(frozen=True, slots=True)
class Datagram:
    """A datagram whose tag is right, without it. ``sequence`` and ``index`` mean what the kind says."""

    kind: int
    client: int
    round: int
    sequence: int
    index: int
    payload: bytes = b""


def values_at(mtu: int) -> int:
    """Return how many float32 values a datagram carries without fragments."""
    return (min(mtu - _IP_HEADERS, LARGEST_DATAGRAM) - OVERHEAD) // 4


def digest(payload: bytes | memoryview) -> bytes:
    """Return the digest of a payload, which goes into the tag."""
    return hashlib.blake2b(payload, digest_size=DIGEST_SIZE).digest()


def seal(key: bytes, message: Datagram) -> bytes:
    """Return the datagram of a message."""
    head = HEADER.pack(
        VERSION << 4 | message.kind,
        0,
        message.client,
        message.round,
        message.sequence,
        message.index,
    )
    return head + message.payload + _tag(key, head, message.payload)


def _tag(key: bytes, head: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(head + digest(payload), key=key, digest_size=TAG_SIZE).digest()


def parse(datagram: bytes) -> Datagram | None:
    """Return what a datagram says, its tag unchecked; None if it is too short or of another layout."""
    if not OVERHEAD <= len(datagram) <= LARGEST_DATAGRAM:
        return None
    first, reserved, client, number, sequence, index = HEADER.unpack_from(datagram)
    if first >> 4 != VERSION or reserved:
        return None
    payload = datagram[HEADER.size : -TAG_SIZE]
    return Datagram(first & 15, client, number, sequence, index, payload)


def is_genuine(key: bytes, datagram: bytes) -> bool:
    """Return whether the tag of a datagram that ``parse`` took is the key's."""
    expected = _tag(key, datagram[: HEADER.size], datagram[HEADER.size : -TAG_SIZE])
    return hmac.compare_digest(expected, datagram[-TAG_SIZE:])
