# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): the updates of one worker as they are sent: encoded once, with what is kept of
earlier ones.

Buffers behind the parameters are sent as they are: a variance that is off may fall below 0, and what it has
lost is no loss of the next one.

What parameters lose by their encoding is added to the next update (error feedback), so that nothing is lost
for good. It is kept when the next update is encoded, and only if this one was sent as a whole: until then the
same bytes can be sent again. An update that is dropped, or sent in part, leaves no trace: its samples are
asked for again, and the next update adds what was kept before it. What is kept ends with the worker: one
that is lost, because its update was refused or for another reason, begins with nothing, and a job that
resumes, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from millpond.aggregate.encoding.codec import codec
from millpond.aggregate.encoding.layout import MOST_BLOCK, Bounds, Buffer, Encoding

_PART = 8 * MOST_BLOCK
"""Values that are encoded at a time, whole blocks of every encoding."""


class UpdateEncoder:
    """Encodes updates of ``size`` values, the first ``parameters`` of parameters, by default all. Its memory,
    besides the bytes of an update: two vectors of float32 if the encoding feeds back.
    """

    def __init__(self, encoding: Encoding, size: int, parameters: int | None = None) -> None:
        self.encoding, self._size = encoding, size
        self._end = size if parameters is None else parameters
        self._data = memoryview(bytearray(self._place(size)))
        kept = 4 * self._end * encoding.feeds_back
        self._kept, self._left = (memoryview(bytearray(kept)) for _ in range(2))
        self._sent, self._task = False, object()

    def encode(
        self, values: memoryview, seen: Callable[[memoryview], Buffer], task: object = None
    ) -> tuple[float, float]:
        """Encode another update, float32 values of which each part is taken as ``seen`` returns it. What the
        last update has lost is kept if that was sent, and was of another ``task``: one that is asked for
        again has not counted, though it was sent. Returns the largest magnitude of the parameters' values
        as they will be decoded, and their L2 norm: both NaN if one is not finite.
        """
        if self._sent and (task is None or task != self._task):
            self._kept, self._left = self._left, self._kept
        self._sent, self._task = False, task
        found, place = Bounds(), 0
        for start in range(0, self._end, _PART):
            span = slice(4 * start, 4 * min(start + _PART, self._end))
            part = seen(values[span])
            size = self.encoding.size(len(part) // 4)
            feedback = (self._kept[span], self._left[span]) if self.encoding.feeds_back else ()
            out = self._data[place : place + size]
            found = found.joined(codec(self.encoding).encode(self.encoding, part, out, *feedback))
            place += size
        self._data[place:] = seen(values[4 * self._end :])
        return found.largest, math.sqrt(found.squares)

    def is_end(self, stop: int) -> bool:
        """Return whether the first ``stop`` values can be sent alone."""
        return stop == self._size or not stop % MOST_BLOCK

    def data(self, start: int, stop: int) -> memoryview:
        """Return the bytes of values between such ends."""
        return self._data[self._place(start) : self._place(stop)]

    def _place(self, stop: int) -> int:
        return self.encoding.place(stop, self._end)

    def sent(self, stop: int) -> None:
        """Note that the first ``stop`` values were sent."""
        self._sent = self._sent or stop == self._size
