# SPDX-License-Identifier: Apache-2.0
"""Pure: the plan of rounds: each chosen worker trains on all its samples, up to a deadline."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from millpond.train.balance.controller import BatchPlan
from millpond.train.balance.curve import Floats, Ints
from millpond.train.determinism import seeds


class RoundPlanner:
    """Plans rounds of ``deadline`` seconds for ``names``, by rank; ``choose`` may leave workers out."""

    def __init__(self, names: Sequence[str], deadline: float) -> None:
        self._names, self._deadline = names, deadline
        self._samples: Ints = np.zeros(len(names), np.int64)
        self.left_out: list[int] = []

    @property
    def plan(self) -> BatchPlan:
        """All samples of the present workers that are not left out."""
        batches = self._samples.copy()
        batches[self.left_out] = 0
        return BatchPlan(batches, np.zeros(len(self._names)), self._deadline)

    def choose(self, left_out: Sequence[int]) -> None:
        """Leave these workers out of the next round."""
        self.left_out = list(left_out)

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


def selected(devices: Sequence[int], fraction: float, least: int, seed: int, number: int) -> list[int]:
    """Return the devices of round ``number``: ``fraction`` of them, rounded up, but at least ``least``. The
    choice follows from the arguments; every device is as likely as any other.
    """
    wanted = min(len(devices), max(least, math.ceil(fraction * len(devices) - 1e-9)))
    if wanted == len(devices):
        return list(devices)
    key = seeds.derive(seed, "selection", number)
    chosen = np.random.Generator(np.random.Philox(key=key)).permutation(len(devices))[:wanted]
    return sorted(devices[index] for index in chosen.tolist())
