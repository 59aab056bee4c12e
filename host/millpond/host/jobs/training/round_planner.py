# SPDX-License-Identifier: Apache-2.0
"""Pure: the plan of rounds: each present worker trains on all its samples, up to a deadline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millpond.train.balance.controller import BatchPlan
from millpond.train.balance.curve import Floats, Ints


class RoundPlanner:
    """Plans rounds of ``deadline`` seconds for ``names``, by rank."""

    def __init__(self, names: Sequence[str], deadline: float) -> None:
        self._names, self._deadline = names, deadline
        self._samples: Ints = np.zeros(len(names), np.int64)

    @property
    def plan(self) -> BatchPlan:
        """All samples of all present workers."""
        return BatchPlan(self._samples.copy(), np.zeros(len(self._names)), self._deadline)

    @property
    def background(self) -> Ints:
        """None: no worker is too slow to be asked."""
        return np.zeros(len(self._names), np.int64)

    def join(self, rank: int, samples: int) -> None:
        """Add a present worker with its samples."""
        self._samples[rank] = samples

    def leave(self, rank: int) -> None:
        """Remove a worker."""
        self._samples[rank] = 0

    def observe(self, _batches: Ints, _measured: Floats, _busy: Floats | None = None, /) -> bool:
        """Ignore the measurements: there is never a new plan."""
        return False

    @property
    def description(self) -> str:
        """The plan in one line."""
        found = zip(self._names, self._samples.tolist(), strict=True)
        return ", ".join(f"{name} {samples} samples" for name, samples in found if samples)
