# SPDX-License-Identifier: Apache-2.0
"""Pure: which samples a mini-epoch has: a slice of a pass, which is the data set in random order.

A slice of what lies in storage in the order of classes has few of them; a slice of a random order has all.
A pass is divided evenly, so that no short rest of it is repeated as often as the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from millpond.train.balance.curve import Ints
from millpond.train.determinism import seeds

if TYPE_CHECKING:
    from millpond.train.task.task import SampleSet

    Wanted = Sequence[tuple[SampleSet, Ints]]
    """Samples of data sets, by their indices there."""


@dataclass(frozen=True, slots=True)
class Place:
    """A mini-epoch: the groups from ``start`` to ``stop`` in the order of a pass; it has been repeated
    ``done`` times.
    """

    number: int = 0
    start: int = 0
    stop: int = 0
    done: int = 0


class PassOrder(Protocol):
    """The groups of samples that are in the same mini-epoch, in the order of each pass."""

    @property
    def ends(self) -> Ints:
        """The samples up to each group, of which there are some."""

    def wanted(self, place: Place) -> Wanted:
        """Return the samples of a mini-epoch."""


def following(order: PassOrder, before: Place | None, most: int) -> Place:
    """Return the mini-epoch after one, of ``most`` samples at most, but of a group at least."""
    number, start = (0, 0) if before is None else (before.number, before.stop)
    ends = order.ends
    if start >= len(ends):
        number, start = number + 1, 0
    before_it = int(ends[start - 1]) if start else 0
    parts = -(-(int(ends[-1]) - before_it) // max(most, 1))
    fitting = int(np.searchsorted(ends, before_it + most, side="right")) - start
    return Place(number, start, start + max(min(-(-(len(ends) - start) // parts), fitting), 1))


class SinglePasses:
    """The orders of passes over ``dataset``, sample by sample: another one for each pass if ``recompose``."""

    def __init__(self, dataset: SampleSet, seed: int, *, recompose: bool = True) -> None:
        if len(dataset) < 1:
            raise ValueError("a data set without samples has no mini-epochs")
        self._dataset, self._seed, self._recompose = dataset, seed, recompose
        self.ends = np.arange(1, len(dataset) + 1)

    def wanted(self, place: Place) -> Wanted:
        key = seeds.derive(self._seed, "mini-epochs", place.number if self._recompose else 0)
        order = np.random.Generator(np.random.Philox(key=key)).permutation(len(self.ends))
        return [(self._dataset, order[place.start : place.stop])]
