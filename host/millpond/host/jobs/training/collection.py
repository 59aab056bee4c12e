# SPDX-License-Identifier: Apache-2.0
"""Pure: the collection of answers: which workers owe one, whether it counts, and when an exchange is over.

An exchange is over when all workers that have a part in its plan have answered, or at its deadline. Where
late answers count, a worker that owes one goes on, and the exchange waits beyond its deadline for the first
answer at least. Where they do not, the answers that are owed at the end are worth nothing when they come.
An asynchronous exchange is over when a buffer is full of answers, whatever other workers do.

An update from a state that is ``s`` exchanges old counts ``1 / sqrt(1 + s)`` of what it would, as in FedBuff
(Nguyen et al. 2022, arXiv:2106.06639); the divisor of the mean stays, so stale updates move the model less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from millpond.train.job.spec import Job


@dataclass(frozen=True, slots=True)
class LatePolicy:
    """Whether late updates count, and whether ``discounted`` by their age, of which ``most`` is the largest
    that counts. With a ``buffer`` an exchange ends when so many updates have come, whoever sent them.
    """

    counts: bool = True
    discounted: bool = False
    most: int | None = None
    buffer: int = 0

    @classmethod
    def of(cls, job: Job) -> LatePolicy:
        """Return the policy of a job. In synchronous steps all samples of an epoch count the same."""
        if job.synchronous:
            return cls()
        spec = job.averaging
        counts = bool(spec.buffer) or spec.late == "carry"
        return cls(counts, counts, spec.max_staleness, spec.buffer)

    def is_too_old(self, age: int) -> bool:
        """Return whether an update from a state that is ``age`` exchanges old does not count."""
        return self.most is not None and age > self.most

    def weight(self, age: int) -> float:
        """Return what such an update counts, 0 to 1."""
        return 1 / math.sqrt(1 + age) if self.discounted else 1.0


ALL_COUNT: Final = LatePolicy()
"""All updates count the same, however late they are."""


class Collection:
    """The answers of workers, by rank, over the exchanges of a job."""

    def __init__(self, *, late_counts: bool, buffer: int = 0) -> None:
        self._late_counts, self._buffer = late_counts, buffer
        self._owing: dict[int, bool] = {}  # whether the answer will count
        self._planned: set[int] = set()
        self._deadline, self._answers = math.inf, 0

    def begin(self, deadline: float) -> None:
        """Begin an exchange that ends at ``deadline``, infinity for when all have answered."""
        self._deadline, self._answers = deadline, 0
        self._planned.clear()

    def plan(self, rank: int) -> None:
        """Note that a worker has a part in the exchange, whether it can be asked now or owes an answer."""
        self._planned.add(rank)

    def ask(self, rank: int) -> None:
        """Note that a worker was given a task."""
        self._owing[rank] = True

    def answered(self, rank: int, *, too_old: bool = False) -> bool:
        """Note an answer. Returns whether it counts."""
        counts = self._owing.pop(rank) and not too_old
        self._answers += counts
        return counts

    def lost(self, rank: int) -> bool:
        """Note the loss of a worker. Returns whether its answer would have counted."""
        self._planned.discard(rank)
        return self._owing.pop(rank, False)

    @property
    def owing(self) -> list[int]:
        """The ranks of the workers that owe an answer that counts, ascending."""
        return sorted(rank for rank, counts in self._owing.items() if counts)

    def is_over(self, now: float) -> bool:
        """Return whether the exchange ends now."""
        if self._buffer:
            return self._answers >= self._buffer or not self._owing
        if now >= self._deadline and (self._answers or not self._late_counts):
            return True
        if any(rank in self._planned for rank in self._owing):
            return False
        return not self._owing or (self._answers > 0 and self._deadline < math.inf)

    def end(self) -> list[int]:
        """End the exchange. Returns the ranks of the workers that have not answered."""
        missing = [] if self._buffer else self.owing
        if not self._late_counts:
            self._owing = dict.fromkeys(self._owing, False)
        return missing
