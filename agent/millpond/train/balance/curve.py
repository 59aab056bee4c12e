# SPDX-License-Identifier: Apache-2.0
"""Pure: seconds that a worker takes for its whole own work of one step, by its batch.

Every worker computes the plan for itself from the same numbers, on processors of several kinds. So here and
in the other modules of this package arithmetic is +, -, * and / of float64 in separate operations, which IEEE
754 rounds alike everywhere: no exp or log, no ``numpy.interp``, which may contract a product and a sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_NEVER_FASTER = 1e-6
"""Relative: by how much a larger batch takes longer at least, where measurements say that it does not."""
_AS_GOOD = 0.99
"""A batch with this part of the greatest speed is as good, and smaller."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A worker's seconds by batch, as straight lines between measured points, the last one prolonged.
    ``batches`` are in samples, ascending, ``seconds`` those of each, ascending. Before the first point the
    time falls with its own slope, to no less than 0.
    """

    batches: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.batches or len(self.batches) != len(self.seconds):
            raise ValueError("a curve has as many times as batches, and at least one")
        if self.batches[0] < 1 or any(a >= b for a, b in zip(self.batches, self.batches[1:], strict=False)):
            raise ValueError(f"batches must ascend from 1 or more: {self.batches}")
        if self.seconds[0] <= 0 or any(a >= b for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ValueError(f"times must ascend from more than 0: {self.seconds}")

    @staticmethod
    def fit(measured: Iterable[tuple[int, float]]) -> Curve:
        """Make a curve of the medians of measured (batch, seconds) in any order; a time that is less than
        that of a smaller batch is raised to it. Raises ValueError for nothing or for times that are not
        positive.
        """
        by_batch: dict[int, list[float]] = {}
        for batch, seconds in measured:
            by_batch.setdefault(batch, []).append(seconds)
        times: list[float] = []
        for batch in sorted(by_batch):
            time = median(by_batch[batch])
            times.append(max(time, times[-1] * (1 + _NEVER_FASTER)) if times else time)
        return Curve(tuple(sorted(by_batch)), tuple(times))

    def time(self, batch: Ints) -> Floats:
        """Return the seconds of each batch, any shape; 0 for a batch of 0."""
        batches, seconds = self._lines()
        line = np.searchsorted(batches[1:-1], batch, side="left")
        slope = (seconds[line + 1] - seconds[line]) / (batches[line + 1] - batches[line])
        return np.where(batch > 0, seconds[line] + slope * (batch - batches[line]), 0.0)

    @property
    def peak(self) -> int:
        """Return the smallest measured batch whose speed is as good as the best: beyond it memory is all that
        grows, and for large images the speed falls.
        """
        speeds = [batch / time for batch, time in zip(self.batches, self.seconds, strict=True)]
        best = _AS_GOOD * max(speeds)
        return next(batch for batch, speed in zip(self.batches, speeds, strict=True) if speed >= best)

    @property
    def speed(self) -> float:
        """Return the samples per second at the peak."""
        return self.peak / self.seconds[self.batches.index(self.peak)]

    def _lines(self) -> tuple[Floats, Floats]:
        """Return the corners of the lines: the measured points, one before them and one behind."""
        batches, seconds = list(map(float, self.batches)), list(self.seconds)
        slope = seconds[0] / batches[0]
        if len(batches) > 1:
            slope = min(slope, (seconds[1] - seconds[0]) / (batches[1] - batches[0]))
        last = slope if len(batches) == 1 else (seconds[-1] - seconds[-2]) / (batches[-1] - batches[-2])
        before = seconds[0] - slope * batches[0]
        return (
            np.array([0.0, *batches, 2 * batches[-1]]),
            np.array([before, *seconds, seconds[-1] + last * batches[-1]]),
        )
