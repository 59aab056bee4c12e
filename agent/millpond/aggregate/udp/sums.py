# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): the values behind the datagrams: exact sums and their means, and a client's two
vectors.

Memory of an aggregator: float64 totals, which are two models; divisors and digests, 40 bytes for each
datagram of a vector; and the mean as float32 if ``mean`` is asked for. A part of the mean is divided whenever
it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from millpond.aggregate.exact import scale_of
from millpond.aggregate.kernels import Vector, kernels
from millpond.aggregate.udp.aggregator import ClientHead
from millpond.aggregate.udp.datagrams import VectorPlan

_CHUNK = 1 << 15
_LARGEST = float(np.finfo(np.float32).max)


class BlockSums:
    """The exact sums of a round, see ``aggregate.exact``; datagrams come in any order."""

    def __init__(self, plan: VectorPlan, clients: Sequence[ClientHead]) -> None:
        self._plan, self._clients, self._kernels = plan, tuple(clients), kernels()
        self.totals, self.divisors = np.zeros(plan.size), np.zeros(plan.blocks)
        self.bounds = np.array([_bound(each.largest) for each in clients], np.float32)
        self.shift = 0.0

    def scale(self, active: NDArray[np.uint8]) -> float:
        """See MeanSums."""
        largest = [each.largest for each, is_active in zip(self._clients, active, strict=True) if is_active]
        return scale_of(max(largest), len(largest))

    def begin(self, active: NDArray[np.uint8]) -> None:
        """See MeanSums."""
        self.totals[:] = 0.0
        self.shift = 3 * 2.0**51 / self.scale(active)
        self.weigh(active)

    def weigh(self, active: NDArray[np.uint8]) -> None:
        """See MeanSums."""
        self.divisors[:] = self._weight(active.astype(bool))

    def divide_by(self, index: int, clients: NDArray[np.bool_]) -> None:
        """See MeanSums."""
        self.divisors[index] = self._weight(clients)

    def take(self, row: int, index: int, values: Vector) -> bool:
        """See BlockSink."""
        totals = self.totals[self._slice(index)]
        bound = float(self.bounds[row])
        return self._kernels.add_rounded(totals, np.ascontiguousarray(values), 1.0, self.shift, bound)

    def payload(self, index: int) -> bytes:
        """Return the values of a part of the mean as they are sent."""
        place = self._slice(index)
        mean = np.empty(place.stop - place.start, np.float32)
        self._kernels.divide(mean, self.totals[place], float(self.divisors[index]))
        return mean.tobytes()

    def mean(self, counts: NDArray[np.uint32]) -> Vector:
        """Return the mean, in the memory of the sums, which are of no use then; 0.0 where ``counts`` says
        that no client's values have come.
        """
        mean, plan = self.totals.view(np.float32)[: self._plan.size], self._plan
        for first, last in _runs(np.where(counts > 0, self.divisors, 0.0)):
            for start in range(first * plan.values, min(last * plan.values, plan.size), _CHUNK):
                stop = min(start + _CHUNK, last * plan.values, plan.size)
                part = np.zeros(stop - start, np.float32)
                if counts[first]:
                    self._kernels.divide(part, self.totals[start:stop], float(self.divisors[first]))
                mean[start:stop] = part  # behind what is still to be divided
        return mean

    def _slice(self, index: int) -> slice:
        start = index * self._plan.values
        return slice(start, start + self._plan.length(index))

    def _weight(self, clients: NDArray[np.bool_]) -> float:
        return sum(each.weight for each, counts in zip(self._clients, clients, strict=True) if counts)


class ClientVectors:
    """A vector that a client sends, and the mean that comes, at first its own values over its weight."""

    def __init__(self, plan: VectorPlan, values: Vector, weight: float) -> None:
        if values.shape != (plan.size,) or values.dtype != np.float32 or not values.flags.c_contiguous:
            raise ValueError(f"a vector of {plan.size} float32 values in order is expected")
        self._plan, self.values, self._weight = plan, values, weight
        self.mean = np.empty(plan.size, np.float32)

    def begin(self) -> None:
        """See MeanSink."""
        np.divide(self.values, np.float32(self._weight), out=self.mean)

    def take(self, row: int, index: int, values: Vector) -> bool:  # noqa: ARG002 - there is one row
        """See BlockSink."""
        start = index * self._plan.values
        self.mean[start : start + len(values)] = values
        return True

    def payload(self, index: int) -> bytes:
        """Return the values of a datagram as they are sent."""
        start = index * self._plan.values
        return self.values[start : start + self._plan.length(index)].tobytes()


def _bound(largest: float) -> float:
    return min(float(np.float32(min(largest, _LARGEST))), _LARGEST)


def _runs(values: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return the places where runs of equal values begin and end."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return list(pairwise(edges))
