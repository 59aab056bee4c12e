# SPDX-License-Identifier: Apache-2.0
"""Pure: one step's mean of many workers' sums, added in an order that is independent of arrival.

Floating-point addition depends on its order, so vectors are added in the order in which they were announced.
A vector that comes before its turn waits, and is added as soon as all before it have been: most of the work
is done while other vectors are still under way. Adding in place takes half the time of adding into other
memory.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from millpond.train.reduce.exact import Vector


class OrderedSum:
    """Adds up vectors like ``total``, float32 [size], in ``total``. ``announce`` all, ``add`` those that
    arrive, then ``divide``.

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
        """Return the samples of all added vectors."""
        return self._samples

    def begin(self) -> None:
        """Begin a new sum: nothing is announced, nothing was added."""
        self._order.clear()
        self._waiting.clear()
        self._first, self._begun, self._samples = None, False, 0

    def announce(self, key: Hashable) -> None:
        """Put ``key`` next in the order."""
        self._order.append(key)

    def add(self, key: Hashable, vector: Vector, samples: int) -> None:
        """Add an announced vector, a sum over ``samples`` samples."""
        self._waiting[key] = vector
        self._samples += samples
        while self._order and self._order[0] in self._waiting:
            self._count(self._waiting.pop(self._order.pop(0)))

    def divide(self) -> None:
        """Divide the sum of the added vectors by their samples, at least one; ``total`` holds the mean.
        Vectors that were announced and did not come are dropped.
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
