# SPDX-License-Identifier: Apache-2.0
"""Pure: the batches to measure, one after the other, so that a few seconds give a worker's curve.

Batches double from the smallest, as a curve rises over powers of two, until two of them in a row bring no
more speed (one may have been disturbed), or samples, memory or seconds do not last for a larger one. The rest
of the seconds goes into the middles of gaps: those on both sides of the peak, whose place decides on the
batches of the whole fleet, and those before it at whose ends the curve bends, where a line would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from millpond.train.balance.curve import Curve
from millpond.train.balance.equal_time import LEAST_BATCH
from millpond.train.balance.profile import Point as Point
from millpond.train.balance.profile import Profile as Profile

REPEATS = 5
"""Measurements of a short batch that count, an odd number; fewer, and odd, where they take more than
``ENOUGH``. The first measurement of a batch does not count: torch fetches memory and chooses algorithms,
which took 10 to 20 %.
"""
ENOUGH = 0.05
"""Part of the seconds to be spent on a batch: a long one is disturbed less, and is too dear to repeat."""
BEND = 0.05
"""Relative: by how much a point is off the line between its neighbours for their gaps to be measured."""


def largest(points: Sequence[Point], samples: int, memory: int | None) -> int:
    """Return the largest batch for which there are ``samples``, and bytes of ``memory`` by the line through
    the last two points, if there are two; 0 if there are none for the smallest.
    """
    if memory is None or not points:
        return samples
    last, before = points[-1], points[max(len(points) - 2, 0)]
    left, growth = memory - last.peak_bytes, last.peak_bytes - before.peak_bytes
    if growth <= 0:
        return samples if left >= 0 else 0
    fitting = last.batch + left * (last.batch - before.batch) // growth
    return min(samples, fitting) if fitting >= LEAST_BATCH else 0


class Probe:
    """Chooses batches to measure: as long as ``next`` has a batch, measure it and ``add`` the result.
    ``seconds`` are for all of them, roughly; the first is measured twice whatever it takes. ``most`` is the
    largest batch that there are samples for, ``memory`` the bytes that the worker may use, None for any.
    """

    def __init__(self, seconds: float, most: int, memory: int | None = None) -> None:
        self._seconds, self._samples, self._memory = seconds, most, memory
        self._spent, self._batch = 0.0, LEAST_BATCH
        self._times: dict[int, list[float]] = {}
        # of batches that were the largest so far: a smaller one would show the peak of a larger
        self._peaks: dict[int, int] = {}

    def next(self) -> int | None:
        """Return the batch to measure; None at the end, at once if there are not samples enough for any."""
        if self._samples < LEAST_BATCH:
            return None
        if not self._times or self._again():
            return self._batch
        return self._larger() or self._between()

    def add(self, batch: int, seconds: float, peak_bytes: int) -> None:
        """Take in a measurement; the first one of each batch is for warming up.

        ``peak_bytes`` is the process's high-water mark, of this step or of all until now. A mark from before
        the probe hides the memory of batches that need less.
        """
        self._spent += seconds
        self._batch = batch
        self._times.setdefault(batch, []).append(seconds)
        if batch >= max(self._peaks, default=0):
            self._peaks[batch] = max(peak_bytes, self._peaks.get(batch, 0))

    @property
    def points(self) -> tuple[Point, ...]:
        """Return the measurements by batch, for ``Curve.fit``. The memory of a batch that was measured after
        a larger one is that of the line between its neighbours.
        """
        return tuple(Point(batch, self._time(batch), self._peak(batch)) for batch in sorted(self._times))

    @property
    def most(self) -> int:
        """Return the largest batch that there are samples and memory for, as far as is known."""
        return largest(self.points, self._samples, self._memory)

    def _again(self) -> bool:
        """Return whether the last batch is to be repeated."""
        times = self._times[self._batch][1:]
        if not times:
            return True  # its seconds were taken into account when it was begun
        many = len(times) >= REPEATS or (len(times) % 2 == 1 and sum(times) >= ENOUGH * self._seconds)
        return not many and self._affords(median(times))

    def _time(self, batch: int) -> float:
        """Return the median of the measurements that count, or of the warm-up alone."""
        times = self._times[batch]
        return median(times[1:] or times)

    def _affords(self, seconds: float) -> bool:
        return self._spent + seconds <= self._seconds

    def _larger(self) -> int | None:
        """Return the next batch of the doubling ones; None if there is no use or room for it."""
        grown = sorted(self._peaks)
        last, batch = grown[-1], min(2 * grown[-1], self.most)
        past = len(grown) > 2 and self._curve(grown).peak <= grown[-3]
        if past or batch <= last or not self._affords(2 * self._time(last) / last * batch):
            return None
        return batch

    def _between(self) -> int | None:
        """Return the middle of the worthwhile gap nearest to the peak, up to the one behind it."""
        batches = sorted(self._times)
        peak = batches.index(self._curve(batches).peak)
        bent = [self._bends(batches[max(0, place - 1) : place + 2]) for place in range(len(batches))]
        gaps = range(min(peak + 1, len(batches) - 1))
        for gap in sorted(gaps, key=lambda gap: abs(2 * (gap - peak) + 1)):
            low, high = batches[gap : gap + 2]
            pays = peak in (gap, gap + 1) or bent[gap] or bent[gap + 1]
            wide = high - low > max(1, low // 2)
            if pays and wide and self._affords(self._time(low) + self._time(high)):
                return (low + high) // 2
        return None

    def _bends(self, batches: Sequence[int]) -> bool:
        """Return whether the middle one of three batches is off the line between the others."""
        if len(batches) < 3:
            return False
        low, middle, high = batches
        first, between, last = map(self._time, batches)
        return abs(between - _on_line(low, middle, high, first, last)) > BEND * between

    def _curve(self, batches: Iterable[int]) -> Curve:
        return Curve.fit((batch, self._time(batch)) for batch in batches)

    def _peak(self, batch: int) -> int:
        if batch in self._peaks:
            return self._peaks[batch]
        low = max(other for other in self._peaks if other < batch)
        high = min(other for other in self._peaks if other > batch)
        return round(_on_line(low, batch, high, self._peaks[low], self._peaks[high]))


def _on_line(low: int, middle: int, high: int, at_low: float, at_high: float) -> float:
    """Return the value at ``middle`` of the line through the values at ``low`` and ``high``."""
    return at_low + (at_high - at_low) * (middle - low) / (high - low)
