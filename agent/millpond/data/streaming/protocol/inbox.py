# SPDX-License-Identifier: Apache-2.0
"""Pure: a consumer's side of an epoch: the samples that it has, those it works on, and what it has done."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from millpond.data.streaming.protocol.leases import merged, without
from millpond.train.balance.ranges import Ranges, count, split


class _Sized(Protocol):
    def __len__(self) -> int: ...


S = TypeVar("S", bound=_Sized)


@dataclass(slots=True)
class _Waiting(Generic[S]):
    """A chunk whose first ``used`` samples are taken; ``ranges`` are the positions of the others."""

    samples: S
    ranges: Ranges
    size: int
    used: int = 0


@dataclass(frozen=True, slots=True)
class Piece(Generic[S]):
    """Samples of a chunk from ``start`` to ``stop``."""

    samples: S
    start: int
    stop: int


class Inbox(Generic[S]):
    """Holds the leased samples of one epoch. ``freed`` counts the bytes of chunks that are used up."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._chunks: deque[_Waiting[S]] = deque()
        self._working: Ranges = ()
        self.done: Ranges = ()
        """Positions that are committed, or have to be."""
        self.freed = 0

    @property
    def working(self) -> Ranges:
        """The positions that were taken since the last commit, in that order."""
        return self._working

    @property
    def bytes(self) -> int:
        """The bytes of all chunks that are not used up."""
        return sum(each.size for each in self._chunks)

    @property
    def still(self) -> Ranges:
        """The positions that this consumer has and that are not done."""
        return merged((*self._working, *(one for each in self._chunks for one in each.ranges)))

    def add(self, samples: S, ranges: Ranges, size: int) -> None:
        """Take in a chunk of ``size`` bytes."""
        self._chunks.append(_Waiting(samples, ranges, size))

    def take(self, wanted: int) -> Sequence[Piece[S]]:
        """Return up to ``wanted`` samples, to be worked on; fewer if there are not as many."""
        found = []
        while wanted and self._chunks:
            chunk = self._chunks[0]
            taken, chunk.ranges = split(chunk.ranges, wanted)
            number = count(taken)
            found.append(Piece(chunk.samples, chunk.used, chunk.used + number))
            chunk.used += number
            wanted -= number
            self._working = (*self._working, *taken)
            if not chunk.ranges:
                self.freed += self._chunks.popleft().size
        return found

    def commit(self, samples: int | None = None) -> Ranges:
        """Note that all steps with what was taken are done, or with the first ``samples`` of it. Returns the
        positions.
        """
        found, self._working = split(self._working, count(self._working) if samples is None else samples)
        found = merged(found)
        self.done = merged((*self.done, *found))
        return found

    def keep(self, held: Ranges) -> Ranges:
        """Forget what is not ``held`` any more: others have it. A chunk of which a part is gone goes whole.
        Returns the positions of such chunks that are still held, which are to be given back.
        """
        gone = without(self.still, held)
        back: list[tuple[int, int]] = []
        for chunk in list(self._chunks):
            if without(chunk.ranges, gone) != merged(chunk.ranges):
                self._chunks.remove(chunk)
                back += without(chunk.ranges, gone)
        self._working = without(self._working, gone)
        return merged(tuple(back))

    def drop(self) -> Ranges:
        """Forget all that was not taken. Returns its positions."""
        found = merged(tuple(one for each in self._chunks for one in each.ranges))
        self.freed += self.bytes
        self._chunks.clear()
        return found
