# SPDX-License-Identifier: Apache-2.0
"""Pure: the leases of an epoch: which positions of its order are leased to whom, and which are done.

Positions are leased in order, ahead of need, and committed when the steps with their samples are done.
What a consumer does not commit goes back when it leaves, or when it has been away for longer than the grace
period, and is leased next. So each position is committed exactly once, whoever joins, dies or changes the
size of its leases. What has to be kept to go on elsewhere is small: the epoch, a cursor, and the positions
before it that are not committed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from millpond.base.errors import LocalError
from millpond.train.balance.ranges import Ranges, count, split

_ROUNDS = 2
"""Leases that each consumer gets, at the least, of what is left: small ones at the end of an epoch let all
consumers end together, whatever the chunk is.
"""


@dataclass(frozen=True, slots=True)
class EpochState:
    """The progress of an epoch of ``samples`` samples, 0 if they are not known yet: positions from ``cursor``
    on, and those ``returned``, are not done yet.
    """

    epoch: int = 0
    cursor: int = 0
    returned: Ranges = ()
    samples: int = 0


@dataclass(slots=True)
class _Held:
    """The leases of a consumer, and when it was lost; None while it is there."""

    ranges: Ranges = ()
    lost: float | None = None


@dataclass(slots=True)
class EpochLeases:
    """Leases the positions of epochs of ``samples`` samples. A consumer that is lost keeps its leases for
    ``grace`` seconds. Raises LocalError for a state that does not fit.
    """

    samples: int
    state: EpochState = field(default_factory=EpochState)
    grace: float = 10.0
    _held: dict[str, _Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = state_of(self.state, self.samples)

    @property
    def epoch(self) -> int:
        """The epoch whose positions are leased."""
        return self.state.epoch

    @property
    def left(self) -> int:
        """The positions that nobody holds and that are not committed."""
        return self.samples - self.state.cursor + count(self.state.returned)

    @property
    def done(self) -> bool:
        """Whether all positions are committed."""
        return not self.left and not any(held.ranges for held in self._held.values())

    @property
    def is_deserted(self) -> bool:
        """Whether all consumers have left, or are lost."""
        return all(held.lost is not None for held in self._held.values())

    @property
    def saved(self) -> EpochState:
        """The state to go on from elsewhere: what is leased counts as returned."""
        held = [each for held in self._held.values() for each in held.ranges]
        return replace(self.state, returned=merged((*self.state.returned, *held)))

    @property
    def by_consumer(self) -> Mapping[str, Ranges]:
        """The leases of each consumer."""
        return {name: held.ranges for name, held in self._held.items()}

    def join(self, consumer: str, still: Ranges | None = None) -> Ranges:
        """Take a consumer in, or in again. Of its leases those it ``still`` has remain, None for all; the
        others go back. Returns its leases.
        """
        held = self._held.setdefault(consumer, _Held())
        if still is not None:
            gone = without(held.ranges, still)
            held.ranges = without(held.ranges, gone)
            self._give_back(gone)
        held.lost = None
        return held.ranges

    def restore(self, consumer: str, ranges: Ranges, now: float) -> None:
        """Take in a consumer of other leases, lost ``now``, whose leases are not in this one's state."""
        self._held[consumer] = _Held(ranges, now)

    def lease(self, consumer: str, wanted: int, least: int = 1) -> Ranges:
        """Lease up to ``wanted`` positions, in the order of the epoch, those first that came back. Near the
        end leases become smaller, down to ``least``. Returns none if none is left.
        """
        together = _ROUNDS * max(1, sum(held.lost is None for held in self._held.values()))
        wanted = min(wanted, max(least, math.ceil(self.left / together)))
        again, returned = split(self.state.returned, wanted)
        cursor = self.state.cursor
        end = min(self.samples, cursor + wanted - count(again))
        found = (*again, (cursor, end)) if end > cursor else again
        self.state = replace(self.state, cursor=end, returned=returned)
        held = self._held.setdefault(consumer, _Held())
        held.ranges = merged((*held.ranges, *found))
        return found

    def commit(self, consumer: str, ranges: Ranges) -> int:
        """Note positions as done that this consumer has, or had and nobody else has got yet. Returns how many
        others hold: of these the others' steps count.
        """
        if held := self._held.get(consumer):
            held.ranges = without(held.ranges, ranges)
        self.state = replace(self.state, returned=without(self.state.returned, ranges))
        others = merged(tuple(each for held in self._held.values() for each in held.ranges))
        return count(others) - count(without(others, ranges))

    def give_back(self, consumer: str, ranges: Ranges) -> None:
        """Put leased positions back that the consumer does not want."""
        if not (held := self._held.get(consumer)):
            return
        kept = without(held.ranges, ranges)
        self._give_back(without(held.ranges, kept))
        held.ranges = kept

    def leave(self, consumer: str) -> None:
        """Forget a consumer; its leases go back."""
        if held := self._held.pop(consumer, None):
            self._give_back(held.ranges)

    def lose(self, consumer: str, now: float) -> None:
        """Note that the connection to a consumer has ended."""
        if held := self._held.get(consumer):
            held.lost = now

    def expire(self, now: float) -> Ranges:
        """Take back the leases of those that are lost for longer than the grace period. Returns them."""
        away = {name: held.lost for name, held in self._held.items()}
        gone = [name for name, lost in away.items() if lost is not None and now - lost >= self.grace]
        found = merged(tuple(each for name in gone for each in self._held[name].ranges))
        for name in gone:
            self.leave(name)
        return found

    def next_epoch(self) -> None:
        """Begin the next epoch. Raises LocalError while this one is not done."""
        if not self.done:
            raise LocalError(f"epoch {self.epoch} is not done")
        self.state = EpochState(self.epoch + 1, samples=self.samples)

    def _give_back(self, ranges: Ranges) -> None:
        self.state = replace(self.state, returned=merged((*self.state.returned, *ranges)))


def state_of(state: EpochState, samples: int) -> EpochState:
    """Return a state with the number of samples of its data set. Raises LocalError for that of another."""
    if state.samples not in (0, samples):
        raise LocalError(f"the state of the stream is of {state.samples} samples; the data set has {samples}")
    edges = [edge for each in state.returned for edge in each]
    rising = edges == sorted(set(edges)) and (not edges or edges[0] >= 0)
    if state.epoch < 0 or not max([0, *edges]) <= state.cursor <= samples or not rising:
        raise LocalError(f"the state of the stream is not one of {samples} samples")
    return replace(state, samples=samples)


def merged(ranges: Ranges) -> Ranges:
    """Return disjoint ranges in order, neighbours joined."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            start = found.pop()[0]
        if stop > start:
            found.append((start, stop))
    return tuple(found)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return the positions in ``ranges`` that are not in ``others``; both in any order."""
    left = list(merged(ranges))
    for start, stop in others:
        left = [
            part
            for first, last in left
            for part in ((first, min(last, start)), (max(first, stop), last))
            if part[0] < part[1]
        ]
    return tuple(left)
