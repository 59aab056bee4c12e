# SPDX-License-Identifier: Apache-2.0
"""Reduction trees, and the model that chooses one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.aggregate import topology
from millpond.aggregate.topology import SINK, Network, NetworkLink, ReductionTree

W = 4_000_000.0  # bytes of a vector
SIZE = 1_000_000


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


def network(count: int, rate: float = 1e6, **sink: float) -> Network:
    links = {name: NetworkLink(rate, rate) for name in names(count)}
    return Network(links | {SINK: NetworkLink(sink.get("to", rate), sink.get("out", rate))})


def nodes_of(tree: ReductionTree) -> list[str]:
    return [child for children in tree.subtree(SINK).values() for child in children]


@given(st.integers(1, 40), st.integers(1, 1000))
def test_each_value_of_each_node_is_summed_once(count: int, size: int) -> None:
    for trees in topology.candidates(names(count), size).values():
        covered = sorted((tree.start, tree.stop) for tree in trees)
        assert covered[0][0] == 0 and covered[-1][1] == size
        assert all(first[1] == second[0] for first, second in itertools.pairwise(covered))
        for tree in trees:
            assert sorted(nodes_of(tree)) == sorted(names(count))


def test_shapes() -> None:
    assert topology.tree(names(6), 9)[0].children == {
        SINK: ("n0",),
        "n0": ("n1", "n2"),
        "n1": ("n3", "n4"),
        "n2": ("n5",),
    }
    first, second = topology.ring(names(2), 9)
    assert (first.stop, first.children) == (4, {SINK: ("n0",), "n0": ("n1",)})
    assert (second.start, second.children) == (4, {SINK: ("n1",), "n1": ("n0",)})
    assert [tree.levels() for tree in (*topology.star(names(6), 9), *topology.tree(names(6), 9))] == [1, 3]


@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_a_star_takes_what_firecaffe_s_third_equation_says(count: int) -> None:
    found = topology.choose(names(count), SIZE, network(count), "star")
    assert (found.reduce, found.spread) == pytest.approx((count * W / 1e6, count * W / 1e6))


def test_a_tree_and_a_ring_take_as_long_as_their_busiest_links() -> None:
    hop = 8 * topology.RANGE_VALUES / 1e6
    tree = topology.predict("tree 2", topology.tree(names(15), SIZE), network(15))
    assert tree.reduce == pytest.approx(2 * 2 * W / 1e6 + 3 * hop)
    assert tree.spread == pytest.approx(2 * W / 1e6 + 3 * hop / 2)
    ring = topology.predict("ring", topology.ring(names(16), SIZE), network(16, to=1e9, out=1e9))
    part = W / 16  # a leaf sends it as values, all other nodes of a chain as sums
    sharing = 1 + 0.1 * 15
    assert ring.reduce == pytest.approx(sharing * (1 + 15 * 2) * part / 1e6, rel=0.05)


def test_the_fastest_is_chosen() -> None:
    assert topology.choose(names(1), SIZE, network(1)).topology == "star"
    many = network(16)
    chosen = topology.choose(names(16), SIZE, many)
    all_of_them = [topology.predict(*each, many) for each in topology.candidates(names(16), SIZE).items()]
    assert chosen.seconds == min(each.seconds for each in all_of_them)
    assert chosen.topology != "star"
    fast_sink = network(4, to=math.inf, out=math.inf)
    assert topology.choose(names(4), SIZE, fast_sink).topology == "star"
    assert topology.choose(names(4), SIZE, fast_sink, "tree").topology == "tree 1"
    shared = Network(network(4).links, shared=1e3)  # all links are one: what sends least wins
    assert topology.choose(names(4), SIZE, shared).topology == "star"
    with pytest.raises(ValueError, match="'mesh' is none of auto, star, tree, ring"):
        topology.choose(names(4), SIZE, many, "mesh")
