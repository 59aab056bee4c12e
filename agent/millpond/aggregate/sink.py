# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): the sink of reduction trees, which asks their roots for sums, or for the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from millpond.aggregate.exact import scale_of
from millpond.aggregate.kernels import Vector
from millpond.aggregate.messages import Advance, FetchSums, Spread, Sums, Values
from millpond.aggregate.node import (
    STALL_SECONDS,
    ChildConnections,
    Dial,
    SubtreeSum,
    below_of,
    ranges,
    receive_values,
)
from millpond.aggregate.topology import SINK, ReductionTree
from millpond.base.deadline import Deadline
from millpond.wire.channel import Channel
from millpond.wire.messages import Ok


class TreeReduction:
    """The sink of reductions over nodes; ``dial`` connects to one of them."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._children: dict[int, ChildConnections] = {}

    def run(
        self,
        trees: tuple[ReductionTree, ...],
        bounds: Mapping[str, tuple[float, float]],
        divisor: float,
        mean: Vector,
        exchange: int = 0,
    ) -> None:
        """Write the sums over ``divisor`` of the nodes' updates of ``exchange`` to ``mean``; ``bounds`` are
        the factor and the largest value of each node. The only root of a tree divides itself, and keeps the
        mean: half the bytes. Raises RemoteError if a node is lost or refused, of which the values that were
        not written yet are left as they are.
        """
        largest = max((factor * largest for factor, largest in bounds.values()), default=0.0)
        scale = scale_of(largest, max(len(bounds), 1))

        def reduce(number: int, tree: ReductionTree) -> None:
            request = FetchSums(
                SINK, exchange, tree.start, tree.stop, scale, dict(tree.subtree(SINK)), dict(bounds)
            )
            connections, roots = self._connections(number), tree.children[SINK]
            if len(roots) == 1:
                _fetch_mean(request, roots[0], connections, divisor, mean)
                return
            summing = SubtreeSum(request, roots, connections)
            for start, stop in ranges(tree.start, tree.stop):
                summing.begin()
                summing.add_children(start, stop)
                summing.divide(divisor, mean[start:stop])

        self._for_each(trees, reduce)

    def advance(self, trees: tuple[ReductionTree, ...], step: Advance) -> None:
        """Have the roots, each the only one of its tree, make a step from the state that they have by the
        mean that they keep, and send the new one to all nodes. Raises RemoteError.
        """
        self._spread(trees, None, step)

    def spread(self, trees: tuple[ReductionTree, ...], values: Vector) -> None:
        """Send a state to all nodes. Raises RemoteError."""
        self._spread(trees, values, None)

    def _spread(
        self,
        trees: tuple[ReductionTree, ...],
        values: Vector | None,
        step: Advance | None,
    ) -> None:

        def send(number: int, tree: ReductionTree) -> None:
            request = Spread(SINK, tree.start, tree.stop, dict(tree.subtree(SINK)), step)
            connections = self._connections(number)
            below = [connections[child] for child in tree.children[SINK]]
            for child, channel in zip(tree.children[SINK], below, strict=True):
                channel.send(below_of(request, child), Deadline.after(STALL_SECONDS))
            if values is not None:
                _send_values(values, tree, below)
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


def _fetch_mean(
    request: FetchSums, root: str, connections: ChildConnections, divisor: float, mean: Vector
) -> None:
    channel = connections[root]
    channel.send(replace(below_of(request, root), divisor=divisor), Deadline.after(STALL_SECONDS))
    for start, stop in ranges(request.start, request.stop):
        receive_values(channel, Sums, start, mean[start:stop].data.cast("B"))


def _send_values(values: Vector, tree: ReductionTree, below: Sequence[Channel]) -> None:
    for start, stop in ranges(tree.start, tree.stop):
        for channel in below:
            channel.send(Values(start), Deadline.after(STALL_SECONDS), values[start:stop].data)
