# SPDX-License-Identifier: Apache-2.0
"""Streams whose bytes tell where they belong, for programs and tests: words of 64 bits, little endian, each
with the number of its stream and of itself. A receiver that finds a wrong byte can say where it came from.
"""

from __future__ import annotations

import array
import sys

WORD = 8
_STREAM_SHIFT = 40
_MOST_PLACES = 4


def counted(stream: int, start: int, size: int) -> bytes:
    """The ``size`` bytes of a stream that begin at ``start``."""
    first, skipped = divmod(start, WORD)
    words = -(-(skipped + size) // WORD)
    base = (stream << _STREAM_SHIFT) + first
    block = array.array("Q", range(base, base + words))
    if sys.byteorder == "big":
        block.byteswap()
    return block.tobytes()[skipped : skipped + size]


def origin(data: bytes) -> str:
    """Where bytes belong: two words that follow one another, at any offset, are of a counted stream."""
    for phase in range(WORD):
        word, following = (int.from_bytes(data[at : at + WORD], "little") for at in (phase, phase + WORD))
        if len(data) >= phase + 2 * WORD and following == word + 1:
            stream, number = divmod(word, 1 << _STREAM_SHIFT)
            return f"stream {stream} at {number * WORD - phase}"
    return f"bytes of no stream, {data[: 3 * WORD].hex()}"


class CountedCheck:
    """Compares what comes of a stream with what was sent; ``bytes`` came so far."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self.bytes = 0
        self._pieces = self._wrong = 0
        self._places: list[str] = []

    def take(self, data: bytes) -> None:
        """Check the next bytes, as one call of recv returned them."""
        due = counted(self._stream, self.bytes, len(data))
        if data != due:
            self._note(data, due)
        self.bytes += len(data)

    def _note(self, data: bytes, due: bytes) -> None:
        wrong = [index for index, pair in enumerate(zip(data, due, strict=True)) if pair[0] != pair[1]]
        self._wrong += len(wrong)
        self._pieces += 1
        if self._pieces > _MOST_PLACES:
            return
        first, last = wrong[0], wrong[-1]
        self._places.append(
            f"{len(wrong)} of those from {self.bytes + first} to {self.bytes + last}, which came with the "
            f"{len(data)} from {self.bytes}, are {origin(data[first : first + 3 * WORD])} and in the end "
            f"{origin(data[last - 3 * WORD : last + 1])}"
        )

    @property
    def verdict(self) -> str:
        """``intact``, or which bytes were wrong and what came in their place."""
        if not self._wrong:
            return "intact"
        return f"{self._wrong} bytes wrong in {self._pieces} pieces: {'; '.join(self._places)}"
