# SPDX-License-Identifier: Apache-2.0
"""Pure: what updates count that come late, from a state that is no longer the newest.

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
