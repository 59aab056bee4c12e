# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock, threads): a node of reduction trees, which adds its vector to the sums of its children.

A node answers its parent's requests range by range, and asks its children for the next range while its
parent takes the last one: no node has more than a range of any other node's vector. The caller of ``serve``
checks whose channel it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np

from millpond.aggregate.exact import ExactSum, OutOfBounds, RefusedUpdate, scale_of
from millpond.aggregate.kernels import Totals, Vector
from millpond.aggregate.messages import FetchSums, Spread, Sums, Values
from millpond.aggregate.topology import RANGE_VALUES, SINK, ReductionTree
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import MillpondError, ProtocolError
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Ok

STALL_SECONDS = 30.0
"""Time without a range, after which a neighbour is lost."""
Dial = Callable[[str], Channel]
M = TypeVar("M", FetchSums, Spread)


class ChildConnections:
    """The channels to the children of one thread, dialled when they are needed."""

    def __init__(self, dial: Dial) -> None:
        self._dial, self._open, self._ended = dial, dict[str, Channel](), False

    def __getitem__(self, node: str) -> Channel:
        if node not in self._open:
            self._open[node] = self._dial(node)
            if self._ended:  # meanwhile, by another thread
                self._open[node].shut_down()
        return self._open[node]

    def end(self) -> None:
        """End all connections, from any thread. The descriptors stay until ``close``: another socket could
        get the number of one that a thread waits for.
        """
        self._ended = True
        for channel in tuple(self._open.values()):
            channel.shut_down()

    def close(self) -> None:
        """Close all connections, which no other thread uses any more."""
        for channel in self._open.values():
            channel.close()


class ReductionNode:
    """A node with the vector ``values``, which a spread overwrites. ``serve`` may run in several threads,
    for parents in different trees.
    """

    def __init__(self, name: str, values: Vector, dial: Dial) -> None:
        self.name, self._values, self._dial = name, values, dial

    def serve(self, parent: Channel) -> None:
        """Answer the requests of a parent until it closes the channel. Raises RemoteError."""
        children = ChildConnections(self._dial)
        try:
            while True:
                request = parent.receive(NEVER).message
                if not isinstance(request, (FetchSums, Spread)):
                    raise ProtocolError(f"'{request.NAME}' has no place in a reduction")
                try:
                    self._answer(parent, request, children)
                except MillpondError as error:
                    parent.send(Failure("subtree", str(error)), Deadline.after(STALL_SECONDS))
                    raise
        finally:
            children.close()

    def _answer(self, parent: Channel, request: FetchSums | Spread, children: ChildConnections) -> None:
        if request.node != self.name or not 0 <= request.start < request.stop <= len(self._values):
            raise ProtocolError(f"{self.name} is asked for what it does not have")
        if isinstance(request, FetchSums):
            self._send_sums(parent, request, children)
        else:
            self._pass_on(parent, request, children)

    def _send_sums(self, parent: Channel, request: FetchSums, children: ChildConnections) -> None:
        own = request.children.get(self.name, ())
        if not own:
            for start, stop in ranges(request.start, request.stop):
                parent.send(Sums(start), Deadline.after(STALL_SECONDS), self._values[start:stop].data)
            return
        summing = SubtreeSum(request, own, children)
        factor, largest = request.bounds[self.name]
        for start, stop in ranges(request.start, request.stop):
            summing.begin()
            summing.add(self.name, self._values[start:stop], factor, largest)
            totals = summing.add_children(start, stop)
            parent.send(Sums(start), Deadline.after(STALL_SECONDS), totals.data)

    def _pass_on(self, parent: Channel, request: Spread, children: ChildConnections) -> None:
        below = [children[child] for child in request.children.get(self.name, ())]
        for child, channel in zip(request.children.get(self.name, ()), below, strict=True):
            channel.send(below_of(request, child), Deadline.after(STALL_SECONDS))
        for start, stop in ranges(request.start, request.stop):
            piece = self._values[start:stop]
            _receive(parent, Values, start, piece.data.cast("B"))
            for channel in below:
                channel.send(Values(start), Deadline.after(STALL_SECONDS), piece.data)
        for channel in below:
            channel.expect(Ok, Deadline.after(STALL_SECONDS))
        parent.send(Ok(), Deadline.after(STALL_SECONDS))


class SubtreeSum:
    """The exact sums of a subtree, range by range, of which ``own`` are the children of its root."""

    def __init__(self, request: FetchSums, own: tuple[str, ...], children: ChildConnections) -> None:
        self._request, self._children = request, {child: children[child] for child in own}
        self._total = ExactSum(RANGE_VALUES)
        self._values = np.empty(RANGE_VALUES, np.float32)
        self._others = np.empty(RANGE_VALUES)
        for child, channel in self._children.items():
            channel.send(below_of(request, child), Deadline.after(STALL_SECONDS))

    def begin(self) -> None:
        """Begin the next range."""
        self._total.begin(self._request.scale)

    def add(self, node: str, values: Vector, factor: float, largest: float) -> None:
        """Add a node's values. Raises RefusedUpdate."""
        try:
            self._total.add(values, factor, largest)
        except OutOfBounds:
            raise RefusedUpdate(node, "its values are beyond those it has announced") from None

    def add_children(self, start: int, stop: int) -> Totals:
        """Add the sums of all children, and return those of the whole subtree, valid until ``begin``."""
        count = stop - start
        for child, channel in self._children.items():
            if child in self._request.children:
                _receive(channel, Sums, start, self._others[:count].data.cast("B"))
                self._merge(child, self._others[:count])
            else:
                _receive(channel, Sums, start, self._values[:count].data.cast("B"))
                self.add(child, self._values[:count], *self._request.bounds[child])
        return self._total.totals(count)

    def divide(self, divisor: float, out: Vector) -> None:
        """Write the sums over ``divisor`` to ``out``."""
        self._total.divide(divisor, out)

    def _merge(self, child: str, sums: Totals) -> None:
        try:
            self._total.merge(sums)
        except OutOfBounds:
            raise RefusedUpdate(child, "its sums are none") from None


class TreeReduction:
    """The sink of reductions over ``nodes``, their factor and largest value by name; ``dial`` connects to
    one of them.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._children: dict[int, ChildConnections] = {}

    def run(
        self,
        trees: tuple[ReductionTree, ...],
        bounds: Mapping[str, tuple[float, float]],
        divisor: float,
        mean: Vector,
    ) -> None:
        """Write the sums over ``divisor`` to ``mean``. Raises RemoteError if a node is lost or refused, of
        which the values that were not written yet are left as they are.
        """
        largest = max((factor * largest for factor, largest in bounds.values()), default=0.0)
        scale = scale_of(largest, max(len(bounds), 1))

        def reduce(number: int, tree: ReductionTree) -> None:
            request = FetchSums(SINK, tree.start, tree.stop, scale, dict(tree.subtree(SINK)), dict(bounds))
            summing = SubtreeSum(request, tree.children[SINK], self._connections(number))
            for start, stop in ranges(tree.start, tree.stop):
                summing.begin()
                summing.add_children(start, stop)
                summing.divide(divisor, mean[start:stop])

        self._for_each(trees, reduce)

    def spread(self, trees: tuple[ReductionTree, ...], values: Vector) -> None:
        """Send values to all nodes. Raises RemoteError."""

        def send(number: int, tree: ReductionTree) -> None:
            request = Spread(SINK, tree.start, tree.stop, dict(tree.subtree(SINK)))
            connections = self._connections(number)
            below = [connections[child] for child in tree.children[SINK]]
            for child, channel in zip(tree.children[SINK], below, strict=True):
                channel.send(below_of(request, child), Deadline.after(STALL_SECONDS))
            for start, stop in ranges(tree.start, tree.stop):
                for channel in below:
                    channel.send(Values(start), Deadline.after(STALL_SECONDS), values[start:stop].data)
            for channel in below:
                channel.expect(Ok, Deadline.after(STALL_SECONDS))

        self._for_each(trees, send)

    def close(self) -> None:
        """Close all connections."""
        for connections in self._children.values():
            connections.close()
        self._children = {}

    def _connections(self, number: int) -> ChildConnections:
        return self._children.setdefault(number, ChildConnections(self._dial))

    def _for_each(
        self, trees: tuple[ReductionTree, ...], action: Callable[[int, ReductionTree], None]
    ) -> None:
        """Run one action a tree, side by side. An error closes all connections, which ends the others."""
        for number in range(len(trees)):
            self._connections(number)
        try:
            with ThreadPoolExecutor(len(trees), "reduction-tree") as pool:
                running = [pool.submit(action, number, tree) for number, tree in enumerate(trees)]
                try:
                    for each in running:
                        each.result()
                except BaseException:
                    for connections in self._children.values():
                        connections.end()
                    raise
        except BaseException:
            self.close()
            raise


def ranges(start: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges that are passed on one by one."""
    return [(place, min(place + RANGE_VALUES, stop)) for place in range(start, stop, RANGE_VALUES)]


def below_of(request: M, child: str) -> M:
    """Return a parent's request to one of its children: with the child's own subtree alone."""
    tree = ReductionTree(request.start, request.stop, request.children)
    below: dict[str, tuple[str, ...]] = tree.subtree(child)
    if isinstance(request, Spread):
        return replace(request, node=child, children=below)
    names = {child, *(name for found in below.values() for name in found)}
    bounds = {name: bound for name, bound in request.bounds.items() if name in names}
    return replace(request, node=child, children=below, bounds=bounds)


def _receive(channel: Channel, kind: type[Sums] | type[Values], start: int, into: memoryview) -> None:
    deadline = Deadline.after(STALL_SECONDS)
    found = channel.expect(kind, deadline, payload=len(into))
    if found.start != start:
        raise ProtocolError(f"{channel.peer} sent values {found.start} where {start} belong")
    channel.receive_into(into, deadline)
