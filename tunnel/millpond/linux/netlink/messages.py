# SPDX-License-Identifier: Apache-2.0
"""Pure: assemble netlink messages and read their acknowledgements (linux/netlink.h)."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator

HEADER = struct.Struct("=IHHII")
"""Size with the header, type, flags, sequence number, port."""
REQUEST, ACKNOWLEDGE, EXCLUSIVE, DUMP, CREATE, APPEND = 0x1, 0x4, 0x200, 0x300, 0x400, 0x800
_ATTRIBUTE, _ERROR = struct.Struct("=HH"), struct.Struct("=i")
_NESTED = 0x8000
ERROR = 2
"""The type of an answer that is an error or an acknowledgement."""
DONE = 3
"""The type of the message that ends an answer of several."""


def message(kind: int, flags: int, body: bytes) -> bytes:
    """Return a message of type ``kind``."""
    return HEADER.pack(HEADER.size + len(body), kind, REQUEST | flags, 1, 0) + body


def attribute(kind: int, data: bytes) -> bytes:
    """Return an attribute, padded to four bytes."""
    size = _ATTRIBUTE.size + len(data)
    return _ATTRIBUTE.pack(size, kind) + data + bytes(-size % 4)


def nested(kind: int, data: bytes) -> bytes:
    """Return an attribute that holds others."""
    return attribute(kind | _NESTED, data)


def text(kind: int, content: str) -> bytes:
    """Return an attribute that holds a string with a zero at its end."""
    return attribute(kind, content.encode() + b"\0")


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and content of each of the attributes that ``data`` consists of."""
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        yield kind & ~_NESTED, data[at + _ATTRIBUTE.size : at + size]
        at += max((size + 3) // 4 * 4, _ATTRIBUTE.size)


def parts(answer: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and body of each of the messages that ``answer`` consists of."""
    at = 0
    while at + HEADER.size <= len(answer):
        size, kind = HEADER.unpack_from(answer, at)[:2]
        yield kind, answer[at + HEADER.size : at + size]
        at += max((size + 3) // 4 * 4, HEADER.size)


def acknowledged(answer: bytes) -> int:
    """Return how many messages an answer acknowledges. Raises OSError for an error, or another answer."""
    count = 0
    for kind, body in parts(answer):
        if kind != ERROR:
            raise OSError(errno.EPROTO, "the kernel gave no answer to a netlink request")
        if code := -_ERROR.unpack_from(body)[0]:
            raise OSError(code, os.strerror(code))
        count += 1
    return count
