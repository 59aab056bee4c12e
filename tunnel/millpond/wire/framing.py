# SPDX-License-Identifier: Apache-2.0
"""Pure: encode and parse the frame around every message; nothing is allocated for an unchecked length.

A frame is a prefix of 16 bytes, a msgpack head and, for bulk, raw payload bytes:

| offset | size | field                                   |
|--------|------|-----------------------------------------|
| 0      | 2    | magic, ``mp``                           |
| 2      | 2    | protocol version, big endian            |
| 4      | 4    | length of the head, big endian          |
| 8      | 8    | length of the payload, big endian       |
| 16     |      | head: msgpack ``[name, {field: value}]``|
|        |      | payload: raw bytes                      |
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgpack

from millpond.base.errors import ConfigError, LimitExceeded, ProtocolError, VersionMismatch
from millpond.base.schema import dump, load
from millpond.base.text import escaped, printable
from millpond.wire.messages import Message, registered

PROTOCOL = 13
MAGIC = b"mp"
PREFIX = struct.Struct("!2sHIQ")


@dataclass(frozen=True, slots=True)
class Limits:
    """The most bytes that this side accepts in one head and in one payload."""

    head: int = 1 << 20
    payload: int = 1 << 30


def encode(message: Message, payload_size: int = 0, *, version: int = PROTOCOL) -> bytes:
    """Encode prefix and head of a frame; the payload follows as it is. Raises ConfigError for a number that
    has more than 64 bits, and for a text that is not Unicode, such as a file's name in another encoding.
    """
    try:
        head: bytes = msgpack.packb([type(message).NAME, dump(message)])
    except OverflowError:
        raise ConfigError("a number has more than 64 bits") from None
    except UnicodeEncodeError as error:
        raise ConfigError(f"'{escaped(str(error.object))}' is not UTF-8, and cannot be sent") from None
    return PREFIX.pack(MAGIC, version, len(head), payload_size) + head


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a frame: its message, and the number of raw bytes that follow."""

    message: Message
    payload_size: int


class Receiver:
    """Parses the bytes of one direction of a connection.

    The caller fills ``buffer()`` with up to its length of bytes and reports their number to ``received()``,
    which returns a Head once one is whole. The payload's bytes are the caller's to read, ``payload_size`` of
    them, before the next frame.
    """

    def __init__(self, limits: Limits, peer: str, *, version: int = PROTOCOL) -> None:
        self._limits, self._peer, self._version = limits, peer, version
        self._start()

    def _start(self) -> None:
        self._data = bytearray(PREFIX.size)
        self._have = 0
        self._payload_size: int | None = None

    def buffer(self) -> memoryview:
        """Return the buffer for the next bytes; never empty."""
        return memoryview(self._data)[self._have :]

    @property
    def idle(self) -> bool:
        """Whether the last frame is whole and no byte of the next has come."""
        return self._payload_size is None and self._have == 0

    def received(self, count: int) -> Head | None:
        """Parse ``count`` bytes that were put into ``buffer()``. Raises ProtocolError and its subclasses."""
        self._have += count
        if self._have < len(self._data):
            return None
        if self._payload_size is None:
            head_size, self._payload_size = self._parse_prefix()
            self._data, self._have = bytearray(head_size), 0
            return None
        head = Head(self._parse_head(), self._payload_size)
        self._start()
        return head

    def _parse_prefix(self) -> tuple[int, int]:
        magic, version, head_size, payload_size = PREFIX.unpack(self._data)
        if magic != MAGIC:
            raise ProtocolError(f"{self._peer} does not speak millpond's protocol")
        if version != self._version:
            raise VersionMismatch(self._peer, version, self._version)
        if not 0 < head_size <= self._limits.head:
            raise LimitExceeded(
                f"{self._peer} announced a head of {head_size} bytes; 1 to {self._limits.head} are accepted"
            )
        if payload_size > self._limits.payload:
            raise LimitExceeded(
                f"{self._peer} announced {payload_size} bytes; at most {self._limits.payload} are accepted"
            )
        return head_size, payload_size

    def _parse_head(self) -> Message:
        try:
            name, fields = msgpack.unpackb(self._data, max_str_len=len(self._data))
            return load(registered(name), fields, name, strict=False)
        except KeyError as error:
            reason = printable(str(error), 100)
            raise ProtocolError(f"{self._peer} sent an unknown message: {reason}") from None
        except (ValueError, TypeError, ConfigError, RecursionError) as error:
            reason = printable(str(error) or type(error).__name__, 200)
            raise ProtocolError(f"{self._peer} sent a head that cannot be read: {reason}") from None
