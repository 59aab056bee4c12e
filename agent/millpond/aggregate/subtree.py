# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): the sums of a subtree, which its root takes from the children range by range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from millpond.aggregate.exact import ExactSum, refusing
from millpond.aggregate.kernels import Totals, Vector, Words
from millpond.aggregate.masking.words import WordVector, sum_of_figures
from millpond.aggregate.messages import FetchSums, FetchWords, Spread, Sums, Values, WordsSummed
from millpond.aggregate.progress import STALL_SECONDS, expect
from millpond.aggregate.topology import RANGE_VALUES, ReductionTree
from millpond.base.deadline import Deadline
from millpond.base.errors import ProtocolError
from millpond.wire.channel import Channel

M = TypeVar("M", FetchSums, FetchWords, Spread)


class SubtreeSum(ExactSum):
    """The exact sums of a subtree, range by range, of which ``children`` are those of its root."""

    def __init__(self, request: FetchSums, children: Mapping[str, Channel]) -> None:
        self._request, self._children = request, children
        super().__init__(RANGE_VALUES)
        self._values = np.empty(RANGE_VALUES, np.float32)
        self._others = np.empty(RANGE_VALUES)
        for child, channel in self._children.items():
            channel.send(below_of(request, child), Deadline.after(STALL_SECONDS))

    def add_of(self, node: str, values: Vector, factor: float, largest: float) -> None:
        """Add a node's values. Raises RefusedUpdate."""
        with refusing(node):
            self.add(values, factor, largest)

    def add_children(self, start: int, stop: int) -> Totals:
        """Add the sums of all children, and return those of the whole subtree, valid until ``begin``."""
        count = stop - start
        for child, channel in self._children.items():
            if child in self._request.children:
                receive_values(channel, Sums, start, self._others[:count].data.cast("B"))
                with refusing(child, "its sums are none"):
                    self.merge(self._others[:count])
            else:
                receive_values(channel, Sums, start, self._values[:count].data.cast("B"))
                self.add_of(child, self._values[:count], *self._request.bounds[child])
        return self.totals(count)


class WordSum:
    """The sums of the masked words of a subtree, range by range, of which ``children`` are those of its root.
    They are modulo a power of two, so that masks cancel in the sum of all.
    """

    def __init__(self, request: FetchWords, children: Mapping[str, Channel]) -> None:
        self._request, self._children = request, children
        self._others: Words = WordVector(RANGE_VALUES, request.bits).values
        for child, channel in children.items():
            channel.send(below_of(request, child), Deadline.after(STALL_SECONDS))

    def add_children(self, words: Words, start: int) -> None:
        """Add the words of all children, from value ``start`` on, to ``words``."""
        others = self._others[: len(words)]
        for channel in self._children.values():
            receive_values(channel, Sums, start, others.data.cast("B"))
            words += others

    def end(self, figures: bytes, *own: str) -> WordsSummed:
        """Return the end of the sums of the subtree, to whose root, if it is a node, ``own``, belong these
        figures. Raises ProtocolError if other nodes than those of the subtree are in a sum.
        """
        sums, contributors = [figures], [*own]
        for child, channel in self._children.items():
            found, below = expect(channel, WordsSummed), below_of(self._request, child).children
            names = {child, *(name for names in below.values() for name in names)}
            if sorted(found.contributors) != sorted(names):
                raise ProtocolError(f"{child} has added the words of others than its subtree's")
            sums.append(found.figures)
            contributors += found.contributors
        return WordsSummed(tuple(contributors), sum_of_figures(sums))


def below_of(request: M, child: str) -> M:
    """Return a parent's request to one of its children: with the child's own subtree alone."""
    tree = ReductionTree(request.start, request.stop, request.children)
    below: dict[str, tuple[str, ...]] = tree.subtree(child)
    if isinstance(request, Spread):
        return replace(request, node=child, children=below, describe=False)
    if isinstance(request, FetchWords):
        return replace(request, node=child, children=below)
    names = {child, *(name for found in below.values() for name in found)}
    bounds = {name: bound for name, bound in request.bounds.items() if name in names}
    return replace(request, node=child, children=below, bounds=bounds, divisor=0.0, keep=False)


def receive_values(channel: Channel, kind: type[Sums] | type[Values], start: int, into: memoryview) -> None:
    """Fill ``into`` with the values of the next message, which begin at ``start``. Raises RemoteError."""
    found = expect(channel, kind, payload=len(into))
    if found.start != start:
        raise ProtocolError(f"{channel.peer} sent values {found.start} where {start} belong")
    channel.receive_into(into, Deadline.after(STALL_SECONDS))
