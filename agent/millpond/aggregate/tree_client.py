# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): the sink of reduction trees, which asks their roots for sums, or for the mean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from millpond.aggregate.exact import check_within, most_of_mean, refusing, scale_of
from millpond.aggregate.kernels import LARGEST, Vector
from millpond.aggregate.masking.words import FIGURE_BYTES, WordVector
from millpond.aggregate.messages import (
    Advance,
    FetchSums,
    FetchWords,
    GetState,
    NodeState,
    Spread,
    Sums,
    Unrepaired,
    Values,
)
from millpond.aggregate.node import ChildConnections, Dial
from millpond.aggregate.progress import STALL_SECONDS, expect
from millpond.aggregate.subtree import SubtreeSum, WordSum, below_of, receive_values
from millpond.aggregate.topology import SINK, ReductionTree, ranges
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, ProtocolError
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
        *,
        datagrams: bool = False,
        unrepaired: Unrepaired | None = None,
    ) -> None:
        """Write the sums over ``divisor`` of the nodes' updates of ``exchange`` to ``mean``; ``bounds`` are
        the factor and the largest value of each node. The only root of a tree divides itself, and keeps the
        mean: half the bytes. The root of a star can have the updates by ``datagrams``, also ``unrepaired``.
        Raises RemoteError if a node is lost or refused; values that were not written yet are then as they
        were.
        """

        def reduce(number: int, tree: ReductionTree) -> None:
            request = self._request(tree, bounds, exchange, datagrams, unrepaired)
            connections, roots = self._connections(number), tree.children[SINK]
            if len(roots) == 1:
                _fetch_mean(request, roots[0], connections, divisor, mean)
                return
            summing = SubtreeSum(request, {root: connections[root] for root in roots})
            for start, stop in ranges(tree.start, tree.stop):
                summing.begin(request.scale)
                summing.add_children(start, stop)
                summing.divide(divisor, mean[start:stop])

        self._for_each(trees, reduce)

    def add_words(
        self,
        trees: tuple[ReductionTree, ...],
        words: WordVector,
        exchange: int,
        *,
        datagrams: bool = False,
    ) -> None:
        """Write the sums of the nodes' masked updates of ``exchange`` to ``words``; the root of a star can
        have them by ``datagrams``. Raises RemoteError if a
        node is lost, or if those of others than the nodes of a tree are in its sums; ``words`` are then of no
        meaning.
        """
        bits, figures = 8 * words.values.itemsize, np.zeros((len(trees), 2), np.uint64)

        def add(number: int, tree: ReductionTree) -> None:
            below, connections = dict(tree.subtree(SINK)), self._connections(number)
            request = FetchWords(SINK, exchange, tree.start, tree.stop, bits, below, datagrams)
            summing = WordSum(request, {root: connections[root] for root in tree.children[SINK]})
            for start, stop in ranges(tree.start, tree.stop):
                words.values[start:stop] = 0
                summing.add_children(words.values[start:stop], start)
            figures[number] = np.frombuffer(summing.end(bytes(FIGURE_BYTES)).figures, np.uint64)

        self._for_each(trees, add)
        if (figures != figures[0]).any():
            raise ProtocolError("the trees of one exchange have added the figures of different updates")
        words.figures[:] = figures[0]

    def step(
        self,
        tree: ReductionTree,
        bounds: Mapping[str, tuple[float, float]],
        divisor: float,
        advance: Advance,
        exchange: int = 0,
        *,
        datagrams: bool = False,
        unrepaired: Unrepaired | None = None,
    ) -> NodeState:
        """Have the only root of a tree keep the mean, as by ``run``, and make a step by it, as by
        ``advance``: no request waits for the answer to the other. Returns the description of the state that
        the root then has; ``settle`` waits until all nodes have it. Raises RemoteError.
        """
        found: list[NodeState] = []

        def both(number: int, tree: ReductionTree) -> None:
            (channel,) = self._roots(number, tree)
            request = self._request(tree, bounds, exchange, datagrams, unrepaired)
            root = tree.children[SINK][0]
            channel.send(
                replace(below_of(request, root), divisor=divisor, keep=True), Deadline.after(STALL_SECONDS)
            )
            with contextlib.suppress(ConnectionLost):  # a root that has refused says why before it closes
                self._announce(number, tree, advance, describe=True)
            expect(channel, Ok)
            found.append(expect(channel, NodeState))

        self._for_each((tree,), both)
        return found[0]

    def settle(self, tree: ReductionTree) -> None:
        """Wait until all nodes of a tree have the state of the last ``step``. Raises RemoteError."""
        self._for_each((tree,), lambda number, tree: self._await_all(self._roots(number, tree)))

    def _request(
        self,
        tree: ReductionTree,
        bounds: Mapping[str, tuple[float, float]],
        exchange: int,
        datagrams: bool,
        unrepaired: Unrepaired | None,
    ) -> FetchSums:
        largest = max((factor * largest for factor, largest in bounds.values()), default=0.0)
        scale = scale_of(largest, max(len(bounds), 1))
        below = dict(tree.subtree(SINK))
        return FetchSums(
            SINK,
            exchange,
            tree.start,
            tree.stop,
            scale,
            below,
            dict(bounds),
            datagrams=datagrams,
            unrepaired=unrepaired,
        )

    def state(self, trees: tuple[ReductionTree, ...]) -> NodeState:
        """Return the description of the state that the root of the first tree has. Raises RemoteError."""
        root = trees[0].children[SINK][0]
        channel = self._connections(0)[root]
        channel.send(GetState(root), Deadline.after(STALL_SECONDS))
        return channel.expect(NodeState, Deadline.after(STALL_SECONDS))

    def fetch_state(self, node: str, out: Vector) -> NodeState:
        """Fill ``out`` with the state of a node, over a connection of its own. Raises RemoteError."""
        with contextlib.closing(self._dial(node)) as channel:
            channel.send(GetState(node, values=True), Deadline.after(STALL_SECONDS))
            found = channel.expect(NodeState, Deadline.after(STALL_SECONDS))
            for start, stop in ranges(0, len(out)):
                receive_values(channel, Values, start, out[start:stop].data.cast("B"))
        return found

    def advance(self, trees: tuple[ReductionTree, ...], step: Advance) -> None:
        """Have the roots, each the only one of its tree, make a step from the state that they have by the
        mean that they keep, and send the new one to all nodes. Raises RemoteError.
        """
        self._for_each(trees, lambda number, tree: self._await_all(self._announce(number, tree, step)))

    def spread(self, trees: tuple[ReductionTree, ...], values: Vector) -> None:
        """Send a state to all nodes. Raises RemoteError."""

        def send(number: int, tree: ReductionTree) -> None:
            below = self._announce(number, tree, None)
            _send_values(values, tree, below)
            self._await_all(below)

        self._for_each(trees, send)

    def _announce(
        self, number: int, tree: ReductionTree, step: Advance | None, *, describe: bool = False
    ) -> list[Channel]:
        """Announce a state to the roots of a tree. Returns their channels."""
        request = Spread(SINK, tree.start, tree.stop, dict(tree.subtree(SINK)), step)
        below = self._roots(number, tree)
        for child, channel in zip(tree.children[SINK], below, strict=True):
            own = replace(below_of(request, child), describe=describe)
            channel.send(own, Deadline.after(STALL_SECONDS))
        return below

    def _roots(self, number: int, tree: ReductionTree) -> list[Channel]:
        connections = self._connections(number)
        return [connections[child] for child in tree.children[SINK]]

    def _await_all(self, channels: Sequence[Channel]) -> None:
        for channel in channels:
            expect(channel, Ok)

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
            if len(trees) == 1:  # a thread would cost as much as all else that the host does
                action(0, trees[0])
                return
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
    channel, most = connections[root], most_of_mean(request.bounds.values(), divisor)
    if request.unrepaired:  # it differs from the host's state by what was lost before, too
        most = LARGEST
    channel.send(replace(below_of(request, root), divisor=divisor), Deadline.after(STALL_SECONDS))
    for start, stop in ranges(request.start, request.stop):
        receive_values(channel, Sums, start, mean[start:stop].data.cast("B"))
        with refusing(root, "its mean is none"):
            check_within(mean[start:stop], most)


def _send_values(values: Vector, tree: ReductionTree, below: Sequence[Channel]) -> None:
    for start, stop in ranges(tree.start, tree.stop):
        for channel in below:
            channel.send(Values(start), Deadline.after(STALL_SECONDS), values[start:stop].data)
