# SPDX-License-Identifier: Apache-2.0
"""Reductions by star, tree and ring: the same bits, and losses that end them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from millpond.aggregate import topology
from millpond.aggregate.kernels import Vector
from millpond.aggregate.messages import Advance, FetchSums, LinkProbed, ProbeLink, Sums
from millpond.aggregate.node import ReductionNode, probe
from millpond.aggregate.topology import RANGE_VALUES, ReductionTree, ranges
from millpond.aggregate.tree_client import TreeReduction
from millpond.base.deadline import Deadline
from millpond.base.errors import RemoteError
from millpond.wire.channel import Channel

from .joined_nodes import JoinedNodes

SIZE = 2 * RANGE_VALUES + 77
NAMES = [f"n{number}" for number in range(6)]


class Nodes(JoinedNodes):
    """Nodes in this process, joined by socket pairs, with the updates of one exchange."""

    exchange = 5

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        scales = 10.0 ** rng.integers(-6, 3, (len(NAMES), 1))
        rows = (rng.normal(size=(len(NAMES), SIZE)) * scales).astype(np.float32)
        self.values = dict(zip(NAMES, rows, strict=True))
        self.states = {name: np.zeros(SIZE, np.float32) for name in NAMES}
        self.nodes = {
            name: ReductionNode(name, row, self.states[name], self.dial, self.exchange.__eq__)
            for name, row in self.values.items()
        }
        self.bounds = {name: (1.0, float(np.abs(row).max())) for name, row in self.values.items()}
        self.bounds["n2"] = (0.25, self.bounds["n2"][1])


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.have_ended()


@pytest.fixture
def sink(nodes: Nodes) -> Iterator[TreeReduction]:
    with contextlib.closing(TreeReduction(nodes.dial)) as made:
        yield made


def reduced(nodes: Nodes, sink: TreeReduction, trees: tuple[ReductionTree, ...]) -> Vector:
    mean = np.full(SIZE, np.nan, np.float32)
    sink.run(trees, nodes.bounds, 7.0, mean, nodes.exchange)
    return mean


def test_all_topologies_give_the_same_bits_and_the_mean(nodes: Nodes, sink: TreeReduction) -> None:
    shapes = topology.candidates(NAMES, SIZE)
    assert set(shapes) == {"star", "tree 1", "tree 2", "tree 3", "tree 4", "ring"}
    means = {name: reduced(nodes, sink, trees).tobytes() for name, trees in shapes.items()}
    assert len(set(means.values())) == 1
    factors = {name: factor for name, (factor, _) in nodes.bounds.items()}
    expected = sum(factors[name] * row.astype(np.float64) for name, row in nodes.values.items()) / 7
    assert np.allclose(np.frombuffer(means["star"], np.float32), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["star", "tree 2", "ring"])
def test_a_mean_is_spread_to_all(nodes: Nodes, sink: TreeReduction, name: str) -> None:
    values = np.arange(SIZE, dtype=np.float32)
    sink.spread(topology.candidates(NAMES, SIZE)[name], values)
    assert all(state.tobytes() == values.tobytes() for state in nodes.states.values())


@pytest.mark.parametrize("name", ["tree 1", "tree 4", "ring"])
def test_roots_advance_the_state_by_the_mean_that_they_keep(
    nodes: Nodes, sink: TreeReduction, name: str
) -> None:
    trees, values = topology.candidates(NAMES, SIZE)[name], np.arange(SIZE, dtype=np.float32)
    step = Advance(((10, 20), (RANGE_VALUES - 5, SIZE)))
    with pytest.raises(RemoteError, match="keeps no mean"):
        sink.advance(trees, step)
    sink.spread(trees, values)
    mean = reduced(nodes, sink, trees)
    sink.advance(trees, step)
    for start, stop in step.added:
        mean[start:stop] *= -1
    values -= mean
    assert all(state.tobytes() == values.tobytes() for state in nodes.states.values())


def test_an_update_of_another_exchange_is_none(nodes: Nodes, sink: TreeReduction) -> None:
    trees = topology.tree(NAMES, SIZE)
    with pytest.raises(RemoteError, match=r"n\d has no update of exchange 4"):
        sink.run(trees, nodes.bounds, 7.0, np.empty(SIZE, np.float32), 4)


def test_links_are_probed_between_nodes_too(nodes: Nodes) -> None:
    with nodes.dial("n0") as channel:
        own = probe(channel, "n0", 1 << 20)
        channel.send(ProbeLink("n0", 1 << 20, "n1"), Deadline.after(5))
        other = channel.expect(LinkProbed, Deadline.after(5))
        for found in (own, other):
            assert 0 < found.first <= found.seconds
        with pytest.raises(RemoteError, match="n0 is asked for a probe that it does not have"):
            probe(channel, "n0", 1 << 40)


@pytest.mark.parametrize("name", ["star", "tree 1", "tree 2", "ring"])
def test_a_lost_node_ends_the_reduction_and_the_others_begin_again(
    nodes: Nodes, sink: TreeReduction, name: str
) -> None:
    nodes.gone.add("n4")
    with pytest.raises(RemoteError, match="n4"):
        reduced(nodes, sink, topology.candidates(NAMES, SIZE)[name])
    others = [each for each in NAMES if each != "n4"]
    del nodes.bounds["n4"]
    found = reduced(nodes, sink, topology.candidates(others, SIZE)[name])
    assert found.tobytes() == reduced(nodes, sink, topology.star(others, SIZE)).tobytes()


@pytest.mark.parametrize("name", ["star", "tree 2"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e9])
def test_values_beyond_their_bound_are_refused_by_name(
    nodes: Nodes, sink: TreeReduction, name: str, wrong: float
) -> None:
    nodes.values["n5"][RANGE_VALUES + 3] = wrong
    with pytest.raises(RemoteError, match="n5: update refused: its values are beyond those"):
        reduced(nodes, sink, topology.candidates(NAMES, SIZE)[name])


class LyingRoot:
    """Answers any request for a mean with one that is ``wrong`` everywhere."""

    def __init__(self, wrong: float) -> None:
        self.wrong = wrong

    def serve(self, parent: Channel) -> None:
        request = parent.expect(FetchSums, Deadline.after(5))
        for start, stop in ranges(request.start, request.stop):
            values = np.full(stop - start, self.wrong, np.float32)
            parent.send(Sums(start), Deadline.after(5), values.data)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1e9, 1.01])
def test_a_mean_beyond_what_the_bounds_allow_is_refused_by_the_roots_name(
    nodes: Nodes, sink: TreeReduction, wrong: float
) -> None:
    largest = sum(factor * bound for factor, bound in nodes.bounds.values()) / 7
    nodes.nodes["n0"] = LyingRoot(wrong * largest)  # type: ignore[assignment]
    with pytest.raises(RemoteError, match="n0: update refused: its mean is none"):
        reduced(nodes, sink, topology.below_one(NAMES, SIZE)["star"])


def test_a_node_answers_for_itself_and_its_own_vector_alone(nodes: Nodes, sink: TreeReduction) -> None:
    with pytest.raises(RemoteError, match="n0 is asked for what it does not have"):
        sink.run(topology.star(NAMES, SIZE + 1), nodes.bounds, 7.0, np.empty(SIZE + 1, np.float32), 5)
