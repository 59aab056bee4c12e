"""Pure: one step's mean of many workers' sums, added in an order that does not depend on who answers first.

Floating-point addition depends on its order, so vectors are added in the order in which they were announced.
One that comes before its turn waits, and is added as soon as all before it have been: most of the work is
done while others are still under way. Adding in place takes half the time of adding into other memory.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from millpond.train.reduce.exact import Vector


class OrderedSum:
    """For vectors like ``total``, float32 [size], in which they are added up. ``announce`` all, ``add`` those
    that come, then ``divide``.

    A vector that was added must not change before ``divide`` is called.
    """

    def __init__(self, total: Vector) -> None:
        self.total = total
        self._first: Vector | None = None  # the only one so far
        self._begun = False  # two and more are in ``total``
        self._order: list[Hashable] = []
        self._waiting: dict[Hashable, Vector] = {}
        self._samples = 0

    @property
    def samples(self) -> int:
        """Of what was added."""
        return self._samples

    def begin(self) -> None:
        """Nothing is announced, nothing was added."""
        self._order.clear()
        self._waiting.clear()
        self._first, self._begun, self._samples = None, False, 0

    def announce(self, key: Hashable) -> None:
        """``key`` is next in the order."""
        self._order.append(key)

    def add(self, key: Hashable, vector: Vector, samples: int) -> None:
        """Count a sum over ``samples`` samples that was announced."""
        self._waiting[key] = vector
        self._samples += samples
        while self._order and self._order[0] in self._waiting:
            self._count(self._waiting.pop(self._order.pop(0)))

    def divide(self) -> None:
        """``total`` becomes the sum of what was added over its samples, at least one. What was announced and
        did not come is forgotten.
        """
        for key in self._order:
            if key in self._waiting:
                self._count(self._waiting.pop(key))
        if self._first is not None and not self._begun:
            self.total[:] = self._first
        self.total /= np.float32(self._samples)
        self.begin()

    def _count(self, vector: Vector) -> None:
        if self._begun:
            self.total += vector
        elif self._first is None:
            self._first = vector
        else:
            np.add(self._first, vector, out=self.total)
            self._begun = True
