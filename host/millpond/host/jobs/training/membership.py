# SPDX-License-Identifier: Apache-2.0
"""Pure: the membership of a job: which workers take part, which may come back, and when.

| state  | next states                                              |
|--------|----------------------------------------------------------|
| absent | joined                                                   |
| joined | absent (lost: may come back at once), banned, out        |
| banned | absent, when its time is over                            |
| out    | none: its model, data or answers are of no use to the job |

A worker that is lost ``LOSSES`` times in a row is banned, each time for twice as long. One that has reached
its own limit of memory twice in a row is out. An update that counts ends the row of losses in training, a
score that of losses in scoring: a worker that trains well and dies at each score would come back for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")

LOSSES = 3
BAN_SECONDS, LONGEST_BAN_SECONDS = 30.0, 600.0


class MemberState(StrEnum):
    """The states of a worker in a job."""

    ABSENT = "absent"
    JOINED = "joined"
    BANNED = "banned"
    OUT = "out"


@dataclass(slots=True)
class _Row:
    """The losses of a worker in a row, and whether its own limit of memory was the reason for the last."""

    losses: int = 0
    at_limit: bool = False


@dataclass(slots=True)
class _Member:
    """A worker of a job. ``rows`` are of its losses in training and, by True, in scoring."""

    state: MemberState = MemberState.ABSENT
    banned_until: float = 0.0
    rows: dict[bool, _Row] = field(default_factory=lambda: {False: _Row(), True: _Row()})


class Membership(Generic[T]):
    """The states of all workers by rank. ``present`` has what stands for each that takes part. ``devices``
    are the ranks that the quorum is a share of.
    """

    def __init__(self, workers: int, devices: Iterable[int], quorum: float) -> None:
        self.present: dict[int, T] = {}
        self._members = [_Member() for _ in range(workers)]
        self._devices = frozenset(devices)
        self._quorum = quorum
        self.needed = self._share(len(self._devices))

    def state(self, rank: int, now: float) -> MemberState:
        """Return a worker's state."""
        member = self._members[rank]
        if member.state is MemberState.BANNED and now >= member.banned_until:
            member.state = MemberState.ABSENT
        return member.state

    def join(self, rank: int, who: T) -> None:
        """Note that a worker takes part from now on."""
        self._members[rank].state = MemberState.JOINED
        self.present[rank] = who

    def leave(self, rank: int) -> None:
        """Note that a worker takes no more part; ``lose`` decides about its return."""
        self.present.pop(rank, None)

    def lose(
        self, rank: int, now: float, *, for_good: bool = False, at_limit: bool = False, scoring: bool = False
    ) -> float:
        """Note the loss of a worker, in training or ``scoring``, ``at_limit`` if it had reached its own limit
        of memory. Returns the seconds until it may come back, infinity for never.
        """
        self.leave(rank)
        member = self._members[rank]
        row = member.rows[scoring]
        row.losses += 1
        for_good, row.at_limit = for_good or (at_limit and row.at_limit), at_limit
        if for_good:
            member.state = MemberState.OUT
            return math.inf
        beyond = row.losses - LOSSES
        if beyond < 0:
            member.state = MemberState.ABSENT
            return 0.0
        seconds = min(BAN_SECONDS * 2.0 ** min(beyond, 10), LONGEST_BAN_SECONDS)
        member.state, member.banned_until = MemberState.BANNED, now + seconds
        return seconds

    def losses(self, rank: int, *, scoring: bool = False) -> int:
        """Return how many times in a row a worker was lost."""
        return self._members[rank].rows[scoring].losses

    def counted(self, ranks: Iterable[int], *, scoring: bool = False) -> None:
        """End the row of losses of workers whose updates, or scores, were counted."""
        for rank in ranks:
            self._members[rank].rows[scoring] = _Row()

    @property
    def joined(self) -> frozenset[int]:
        """The ranks of the workers that take part."""
        return frozenset(self.present)

    @property
    def joined_devices(self) -> list[int]:
        """The ranks of the devices that take part, ascending."""
        return sorted(self._devices.intersection(self.present))

    def is_quorum(self, ranks: Iterable[int], asked: Iterable[int] | None = None) -> bool:
        """Return whether these workers are enough for an exchange to count that has ``asked`` these devices,
        or without it all.
        """
        needed = self.needed if asked is None else self._share(len(self._devices.intersection(asked)))
        return len(self._devices.intersection(ranks)) >= needed

    def _share(self, devices: int) -> int:
        return max(1, math.ceil(self._quorum * devices - 1e-9))

    @property
    def can_reach_quorum(self) -> bool:
        """Whether enough devices are not out for good."""
        return sum(self._members[rank].state is not MemberState.OUT for rank in self._devices) >= self.needed
