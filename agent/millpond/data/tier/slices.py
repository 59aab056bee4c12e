# SPDX-License-Identifier: Apache-2.0
"""Pure: which samples a mini-epoch has: a slice of a pass, which is the data set in random order.

A slice of what lies in storage in the order of classes has few of them; a slice of a random order has all.
A pass is divided evenly, so that no short rest of it is repeated as often as the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millpond.train.determinism import seeds

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Place:
    """A mini-epoch: the samples from ``start`` to ``stop`` in the order of a pass; it has been repeated
    ``done`` times.
    """

    number: int = 0
    start: int = 0
    stop: int = 0
    done: int = 0


@dataclass(frozen=True, slots=True)
class PassOrder:
    """The orders of passes over ``samples`` samples: another one for each pass if ``recompose``."""

    samples: int
    seed: int
    recompose: bool = True

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError("a data set without samples has no mini-epochs")

    def indices(self, place: Place) -> Indices:
        """Return the samples of a mini-epoch, in the order of its pass."""
        key = seeds.derive(self.seed, "mini-epochs", place.number if self.recompose else 0)
        order = np.random.Generator(np.random.Philox(key=key)).permutation(self.samples)
        return order[place.start : place.stop]

    def following(self, before: Place | None, most: int) -> Place:
        """Return the mini-epoch after one, of ``most`` samples at most."""
        number, start = (0, 0) if before is None else (before.number, before.stop)
        if start >= self.samples:
            number, start = number + 1, 0
        left = self.samples - start
        parts = -(-left // max(most, 1))
        return Place(number, start, start + -(-left // parts))
