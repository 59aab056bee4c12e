# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): the values behind the datagrams: exact sums and their means, and a client's two
vectors.

Sums of words are modulo 2**64 in the same memory, one for each value: halves of words are joined when all are
there.

Memory of an aggregator: float64 totals, which are two models; divisors and digests, 41 bytes for each
datagram of a vector. A part of the mean is divided whenever it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.aggregate.exact import scale_of, shift_of
from millpond.aggregate.kernels import Vector, kernels
from millpond.aggregate.udp.aggregator import ClientHead
from millpond.aggregate.udp.datagrams import VectorPlan

_LARGEST = float(np.finfo(np.float32).max)


class BlockSums:
    """The exact sums of a round, see ``aggregate.exact``; datagrams come in any order."""

    def __init__(self, plan: VectorPlan, clients: Sequence[ClientHead]) -> None:
        self._plan, self._kernels = plan, kernels()
        self._weights = np.array([each.weight for each in clients])
        self.totals = np.zeros(plan.size)
        self._words = self.totals.view(np.uint64)
        self.divisors = np.full(plan.blocks, sum(self._weights.tolist()))
        self.bounds = np.array([min(each.largest, _LARGEST) for each in clients], np.float32)
        largest = max((each.largest for each in clients), default=0.0)
        self.shift = shift_of(scale_of(largest, len(clients)))

    def take(self, row: int, index: int, values: Vector) -> bool:
        if self._plan.words:
            self._words[self._slice(index)] += values.view(np.uint32)
            return True
        totals = self.totals[self._slice(index)]
        bound = float(self.bounds[row])
        return self._kernels.add_rounded(totals, np.ascontiguousarray(values), 1.0, self.shift, bound)

    def divide_by(self, index: int, clients: NDArray[np.bool_]) -> None:
        """Divide the sums of a datagram by the weights of ``clients``."""
        self.divisors[index] = sum(self._weights[clients].tolist())

    def payload(self, index: int) -> bytes:
        """Return the values of a part of the mean as they are sent."""
        place = self._slice(index)
        if self._plan.words:
            return _joined(self._words[place], self._plan.words)
        mean = np.empty(place.stop - place.start, np.float32)
        self._kernels.divide(mean, self.totals[place], float(self.divisors[index]))
        return mean.tobytes()

    def _slice(self, index: int) -> slice:
        start = index * self._plan.values
        return slice(start, start + self._plan.length(index))


def _joined(totals: NDArray[np.uint64], bits: int) -> bytes:
    """Return sums of words of so many bits as they are sent."""
    if bits == 32:
        return totals.astype(np.uint32).tobytes()
    halves = totals.reshape(-1, 2)
    return (halves[:, 0] + (halves[:, 1] << np.uint64(32))).tobytes()


class ClientVectors:
    """A vector that a client sends, and the mean that comes; without repair its own values over its
    ``weight`` stand where no mean comes.
    """

    def __init__(self, plan: VectorPlan, values: Vector, weight: float = 1.0) -> None:
        if values.shape != (plan.size,) or values.dtype != np.float32 or not values.flags.c_contiguous:
            raise ValueError(f"a vector of {plan.size} float32 values in order is expected")
        self._plan, self.values = plan, values
        self.mean = np.empty(plan.size, np.float32)
        if not plan.repair:
            np.divide(values, np.float32(weight), out=self.mean)

    def take(self, row: int, index: int, values: Vector) -> bool:  # noqa: ARG002 - there is one row
        start = index * self._plan.values
        self.mean[start : start + len(values)] = values
        return True

    def payload(self, index: int) -> bytes:
        """Return the values of a datagram as they are sent."""
        start = index * self._plan.values
        return self.values[start : start + self._plan.length(index)].tobytes()
