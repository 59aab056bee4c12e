"""Pure: one step's sum of many workers' sums, added in an order that does not depend on who answers first.

Floating-point addition depends on its order, so vectors are added in the order in which they were announced.
One that comes before its turn waits, and is added as soon as all before it have been: most of the work is
done while others are still under way.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from millpond.train.flat import Vector


class OrderedSum:
    """For vectors of float32 [size]. ``announce`` all, ``add`` those that come, then ``mean``.

    A vector that was added must not change before ``mean`` is called.
    """

    def __init__(self, size: int) -> None:
        self._sum = np.zeros(size, np.float32)
        self._counted: Vector | None = None  # the sum so far; of one vector it is that one itself
        self._order: list[Hashable] = []
        self._waiting: dict[Hashable, Vector] = {}
        self._samples = 0

    @property
    def samples(self) -> int:
        """Of what was added."""
        return self._samples

    def announce(self, key: Hashable) -> None:
        """``key`` is next in the order."""
        self._order.append(key)

    def add(self, key: Hashable, vector: Vector, samples: int) -> None:
        """Count a sum over ``samples`` samples that was announced."""
        self._waiting[key] = vector
        self._samples += samples
        while self._order and self._order[0] in self._waiting:
            self._count(self._waiting.pop(self._order.pop(0)))

    def mean(self, into: Vector) -> None:
        """Fill ``into`` with the sum of what was added over its samples, at least one. What was announced and
        did not come is forgotten.
        """
        for key in self._order:
            if key in self._waiting:
                self._count(self._waiting.pop(key))
        assert self._counted is not None
        np.divide(self._counted, np.float32(self._samples), out=into)
        self._order.clear()
        self._samples, self._counted = 0, None

    def _count(self, vector: Vector) -> None:
        if self._counted is None:
            self._counted = vector
        else:
            self._counted = np.add(self._counted, vector, out=self._sum)
