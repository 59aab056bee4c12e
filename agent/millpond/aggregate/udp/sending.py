# SPDX-License-Identifier: Apache-2.0
"""Pure: the sending side of one vector: what goes out next, under the receiver's grant, and what is asked
again.

::

    START (again until answered) -> DATA within the grant -> END (again until answered)
                                         ^------- MISSING -------'  '--- ENDED: done
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from millpond.aggregate.udp.datagrams import EARLY, Datagram, DatagramKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from millpond.aggregate.udp.datagrams import VectorPlan

    Indices = NDArray[np.uint32]

_FIRST_WAIT, _LONGEST_WAIT = 0.02, 0.5


class _Phase(Enum):
    IDLE, STARTING, SENDING, ENDING, DONE = range(5)


class OutgoingStream:
    """A vector's way to one receiver. ``order`` holds the indices in the order in which they go out, the
    first ``ready`` of which may go now; ``closed`` says that no more will be ready.
    """

    def __init__(self, plan: VectorPlan, order: Indices, ready: int = 0, *, closed: bool = False) -> None:
        self._plan, self._order, self.ready, self.closed = plan, order, ready, closed
        self.since = 0.0  # when the first of the unanswered words went out
        self._phase, self._pass, self.sequence, self.limit, self._position = _Phase.IDLE, 0, 0, 0, 0
        self._again, self._answered = np.zeros(0, np.uint32), False
        self._at = self._wait = 0.0
        self.unanswered = 0

    @property
    def repaired(self) -> int:
        """How many datagrams were sent beyond one for each block of the vector."""
        return max(0, self.sequence - self._plan.blocks)

    @property
    def done(self) -> bool:
        """Whether the receiver has said that it needs no more."""
        return self._phase is _Phase.DONE

    @property
    def ending(self) -> bool:
        """Whether everything has gone out, and the receiver's word is awaited."""
        return self._phase is _Phase.ENDING

    @property
    def outstanding(self) -> bool:
        """Whether the receiver owes an answer."""
        return self._phase in (_Phase.STARTING, _Phase.ENDING) or (
            self._wants() and self.sequence >= self.limit
        )

    def start(self, now: float) -> None:
        """Ask the receiver for a grant."""
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.STARTING, now)

    def granted(self, limit: int) -> None:
        """Go on up to the sequence number ``limit``."""
        if self._phase is _Phase.STARTING:
            self._phase = _Phase.SENDING
        if limit > self.limit:
            self.limit, self._at, self.unanswered = limit, 0.0, 0

    def ended(self, passed: int) -> None:
        """Hear that the receiver needs no more."""
        if self._phase is _Phase.ENDING and passed == self._pass:
            self._phase = _Phase.DONE

    def missing(self, passed: int, first: int, bitmap: bytes) -> None:
        """Hear which indices, from ``first`` on, are to go out again."""
        early = passed == EARLY and self._phase is _Phase.SENDING
        answer = passed == self._pass and self._phase in (_Phase.ENDING, _Phase.SENDING)
        if not (early or answer) or first & 7:
            return
        start, stop = first >> 3, (first >> 3) + len(bitmap)
        if stop > -(-self._plan.blocks // 8) + 3:  # it is padded
            return
        asked = np.flatnonzero(np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")) + 8 * start
        asked = asked[asked < self._plan.blocks].astype(np.uint32)
        if len(asked):
            self._again, self._answered = np.union1d(self._again, asked), self._answered or answer
            self._phase, self._at, self.unanswered = _Phase.SENDING, 0.0, 0

    def next(self, most: int) -> Indices:
        """Return up to ``most`` indices that may go out now; ``sent`` says how many did."""
        if self._phase is not _Phase.SENDING:
            return self._order[:0]
        most = min(most, self.limit - self.sequence)
        if len(self._again):
            return self._again[: max(most, 0)]
        return self._order[self._position : min(self._position + max(most, 0), self.ready)]

    def sent(self, count: int) -> None:
        """Account for the first ``count`` indices of ``next``."""
        self.sequence += count
        if len(self._again):
            self._again = self._again[count:]
        else:
            self._position += count

    def control(self, now: float) -> tuple[DatagramKind, int, int] | None:
        """Return a word that is due: its kind, sequence number and index."""
        if self._has_sent_all:
            self._pass, self._answered = self._pass + self._answered, False
            self._enter(_Phase.ENDING, now)
        if self._phase is _Phase.SENDING and self._wants() and self.sequence >= self.limit and not self._at:
            self._wait = _FIRST_WAIT
            self._at = now + self._wait  # the grant is on its way in most cases
        if not self.outstanding or now < self._at:
            return None
        self._at, self._wait = now + self._wait, min(2 * self._wait, _LONGEST_WAIT)
        if not self.unanswered:
            self.since = now
        self.unanswered += 1
        if self._phase is _Phase.STARTING:
            return DatagramKind.START, 0, 0
        kind = DatagramKind.END if self.ending else DatagramKind.PROBE
        return kind, self.sequence, self._pass

    def due(self) -> float | None:
        """Return when ``control`` is to be called at the latest, None for not before something has come."""
        if self._has_sent_all:
            return 0.0
        return self._at if self.outstanding else None

    def hear(self, message: Datagram) -> None:
        """Take a word of the receiver."""
        kind = message.kind & 7
        if kind == DatagramKind.GRANT:
            self.granted(message.sequence)
        elif kind == DatagramKind.ENDED:
            self.ended(message.index)
        elif kind == DatagramKind.MISSING:
            self.missing(message.sequence, message.index, message.payload)

    @property
    def _has_sent_all(self) -> bool:
        return self._phase is _Phase.SENDING and self.closed and not self._wants()

    def _wants(self) -> bool:
        if self._phase is not _Phase.SENDING:
            return False
        return len(self._again) > 0 or self._position < self.ready

    def _enter(self, phase: _Phase, now: float) -> None:
        self._phase, self._at, self._wait, self.unanswered = phase, now, _FIRST_WAIT, 0
