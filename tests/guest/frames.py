# SPDX-License-Identifier: Apache-2.0
"""Pure: the frames between a test and agent.py in its guest."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator

_HEAD = struct.Struct("!IIB")


class Kind(enum.IntEnum):
    """What a frame means; its payload in parentheses."""

    READY = 0
    """From the guest: it takes programs ()."""
    INPUT = 1
    """To the guest: a part of what the program will read (bytes); before START."""
    START = 2
    """To the guest: run it (JSON: ``argv`` and ``environment``)."""
    SIGNAL = 3
    """To the guest: send it a signal (decimal number), or its whole process group (minus the number)."""
    OUTPUT = 4
    """From the guest: written to standard output (bytes)."""
    ERRORS = 5
    """From the guest: written to standard error (bytes)."""
    EXIT = 6
    """From the guest: it ended (decimal: exit code, or minus the signal)."""


def encode(kind: Kind, number: int, payload: bytes) -> bytes:
    """One frame for program ``number``."""
    return _HEAD.pack(len(payload), number, kind) + payload


class Decoder:
    """Frames out of a stream."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, int, bytes]]:
        """The frames that ``data`` completes: kind, program, payload."""
        self._rest += data
        while len(self._rest) >= _HEAD.size:
            size, number, kind = _HEAD.unpack_from(self._rest)
            end = _HEAD.size + size
            if len(self._rest) < end:
                return
            payload = bytes(self._rest[_HEAD.size : end])
            del self._rest[:end]
            yield Kind(kind), number, payload
