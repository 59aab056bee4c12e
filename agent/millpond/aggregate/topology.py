# SPDX-License-Identifier: Apache-2.0
"""Pure: reduction trees over a network's links, and the model of their cost that chooses one.

A reduction has one tree for each part of the vector. A leaf sends its own values, 4 bytes each; an inner node
sends the exact sums of its subtree, 8 bytes each; the sink, which is no node, gets the sums of the roots, or
from the only root of a tree the mean, 4 bytes each. The mean, or the state that follows from it, goes the
same way back, 4 bytes a value.

*Star*: the sink is the parent of all. *Tree*: one tree, a heap with ``fan_out`` children. *Ring*: as many
parts as nodes; the tree of part i is the chain that ends in node i, so each link carries all parts but one.

*Cost.* Nodes pass ranges on as they come. A direction takes as long as its busiest link needs for the bytes
of all trees, and not less than one tree alone, whose first range has to pass all levels::

    seconds = max(bytes / rate of a link, bytes of one tree / rate of a link + levels * hop)

Trees that share a link keep each other waiting: by a tenth for each but one (measured, not derived).

With one level this is FireCaffe's equation 3 for each direction. Its equation 4 is for trees whose nodes wait
for whole vectors; here a tree of any depth takes ``W * fan_out / BW`` a direction (twice that for sums of
inner nodes), and a level only adds its hop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

SINK = ""
"""The receiver of the sums, the host as a rule."""
VALUE_BYTES, SUM_BYTES = 4, 8
RANGE_VALUES = 1 << 15
"""The values that a node passes on at a time."""
TOPOLOGIES = ("auto", "star", "tree", "ring")
_FAN_OUTS = (1, 2, 3, 4)
_SHARING = 0.1
"""How much longer a link takes for the same bytes with each further tree; measured with 1 to 15 of them."""


@dataclass(frozen=True, slots=True)
class ReductionTree:
    """The tree of the values from ``start`` to ``stop``: the ``children`` of each node that has some."""

    start: int
    stop: int
    children: Mapping[str, tuple[str, ...]]

    def subtree(self, node: str) -> dict[str, tuple[str, ...]]:
        """Return the children of ``node`` and of all nodes below it."""
        own = self.children.get(node, ())
        found = {node: own} if own else {}
        for child in own:
            found |= self.subtree(child)
        return found

    def levels(self, node: str = SINK) -> int:
        """Return the number of links between ``node`` and its furthest leaf."""
        count, below = 0, self.children.get(node, ())
        while below:
            count, below = count + 1, tuple(child for each in below for child in self.children.get(each, ()))
        return count


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """A node's link to the network: bytes per second to it and from it, and the seconds of a hop."""

    to: float
    out: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Network:
    """The links of all nodes and of the SINK; ``shared`` is the rate of what all links share, such as the
    host's bus or, where all nodes are emulated, its processors, for one stream from each node, and
    ``shared_by_many`` for several: processors do more in each of fewer wake-ups. Nodes in ``uplinks`` have
    another link to the sink, such as a tunnel beside a LAN, than to each other.
    """

    links: Mapping[str, NetworkLink]
    shared: float = math.inf
    shared_by_many: float = 0.0
    uplinks: Mapping[str, NetworkLink] = field(default_factory=dict)

    def link(self, node: str, uplink: bool) -> NetworkLink:
        """Return a node's link to the sink, or to the other nodes."""
        return self.uplinks[node] if uplink else self.links[node]

    def carried(self, trees: int) -> float:
        """Return the bytes per second of all links together, for so many trees side by side."""
        return self.shared if trees == 1 else max(self.shared, self.shared_by_many)

    def after(self, earlier: Network | None) -> Network:
        """Return this network with the nodes that were measured ``earlier``, too."""
        if earlier is None:
            return self
        return replace(
            self, links={**earlier.links, **self.links}, uplinks={**earlier.uplinks, **self.uplinks}
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted seconds of a reduction by ``trees``, and of the way back."""

    topology: str
    trees: tuple[ReductionTree, ...]
    reduce: float
    spread: float

    @property
    def seconds(self) -> float:
        """The seconds of both."""
        return self.reduce + self.spread


def star(nodes: Sequence[str], size: int) -> tuple[ReductionTree, ...]:
    """Return the tree in which every node is a child of the sink."""
    return (ReductionTree(0, size, {SINK: tuple(nodes)}),)


def tree(nodes: Sequence[str], size: int, fan_out: int = 2) -> tuple[ReductionTree, ...]:
    """Return a heap over the nodes, whose first one is the root."""
    children: dict[str, tuple[str, ...]] = {SINK: (nodes[0],)}
    for number, node in enumerate(nodes):
        if found := tuple(nodes[fan_out * number + 1 : fan_out * number + fan_out + 1]):
            children[node] = found
    return (ReductionTree(0, size, children),)


def ring(nodes: Sequence[str], size: int) -> tuple[ReductionTree, ...]:
    """Return a chain for each part of the vector, of which each node has one."""
    trees = []
    for number in range(len(nodes)):
        chain = (SINK, *(nodes[(number - step) % len(nodes)] for step in range(len(nodes))))
        start, stop = size * number // len(nodes), size * (number + 1) // len(nodes)
        children = {chain[place]: (chain[place + 1],) for place in range(len(nodes))}
        if stop > start:
            trees.append(ReductionTree(start, stop, children))
    return tuple(trees)


def predict(topology: str, trees: Iterable[ReductionTree], network: Network) -> Prediction:
    """Return the predicted seconds of a reduction and of the way back."""
    trees = tuple(trees)
    up, down = _seconds(trees, network, upwards=True), _seconds(trees, network, upwards=False)
    return Prediction(topology, trees, up, down)


def _seconds(trees: Sequence[ReductionTree], network: Network, *, upwards: bool) -> float:
    alone = (_busiest((each,), network, upwards) + _fill(each, network, upwards) for each in trees)
    return max(_busiest(trees, network, upwards), *alone)


def _busiest(trees: Sequence[ReductionTree], network: Network, upwards: bool) -> float:
    """Return the seconds that the busiest link needs for all bytes of ``trees``."""
    received: _Volumes = {}
    sent: _Volumes = {}
    for each in trees:
        of_tree = _bytes(each, network, upwards)
        for volumes, side in ((received, 0), (sent, 1)):
            for link, volume in of_tree[side].items():
                volumes.setdefault(link, []).append(volume)
    to = (_shared(volumes) / network.link(*link).to for link, volumes in received.items())
    out = (_shared(volumes) / network.link(*link).out for link, volumes in sent.items())
    return max(*to, *out, sum(map(sum, sent.values())) / network.carried(len(trees)))


_Link = tuple[str, bool]
"""A node, and whether it is its uplink."""
_Volumes = dict[_Link, list[float]]


def _bytes(
    tree: ReductionTree, network: Network, upwards: bool
) -> tuple[dict[_Link, float], dict[_Link, float]]:
    """Return the bytes that come and go over each link in one tree."""
    received: dict[_Link, float] = {}
    sent: dict[_Link, float] = {}
    for parent, children in tree.children.items():
        for child in children:
            divides = parent == SINK and len(children) == 1
            width = SUM_BYTES if upwards and child in tree.children and not divides else VALUE_BYTES
            volume = float(width * (tree.stop - tree.start))
            ends = (child, parent == SINK and child in network.uplinks), (parent, False)
            source, target = ends if upwards else reversed(ends)
            sent[source] = sent.get(source, 0.0) + volume
            received[target] = received.get(target, 0.0) + volume
    return received, sent


def _shared(volumes: Sequence[float]) -> float:
    return sum(volumes) * (1 + _SHARING * (len(volumes) - 1))


def _fill(each: ReductionTree, network: Network, upwards: bool) -> float:
    """Return the seconds until the first range has passed all levels but one."""
    values = min(RANGE_VALUES, each.stop - each.start)
    width = values * (SUM_BYTES if upwards else VALUE_BYTES)
    links = (*network.links.values(), *network.uplinks.values())
    hop = max(width / min(link.to, link.out) + link.latency for link in links)
    return (each.levels() - 1) * hop + max(link.latency for link in links)


def parameter_server_seconds(size: float, nodes: int, rate: float) -> float:
    """Return FireCaffe's equation 3 (section 6.1), ``W * p / BW``: the seconds in which a server gets
    ``size`` bytes from each of ``nodes`` at ``rate`` bytes per second, and sends them at the same time.
    """
    return size * nodes / rate


def reduction_tree_seconds(size: float, nodes: int, rate: float) -> float:
    """Return FireCaffe's equation 4 (section 6.2), ``W * 2 * log2(p) / BW``: the seconds of a binary tree
    whose nodes take ``size`` bytes from two children, one level after the other.
    """
    return size * 2 * math.log2(nodes) / rate


def ranges(start: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges of values that are passed on one by one."""
    return [(place, min(place + RANGE_VALUES, stop)) for place in range(start, stop, RANGE_VALUES)]


def below_one(nodes: Sequence[str], size: int) -> dict[str, tuple[ReductionTree, ...]]:
    """Return the reductions by nodes alone, by name: of each tree a node is the only root, which divides, and
    the first one is the root of a single tree. In a "star" it is the parent of all others.
    """
    found = {"star": tree(nodes, size, max(len(nodes) - 1, 1))}
    fan_outs = [fan_out for fan_out in _FAN_OUTS if fan_out < len(nodes) - 1]
    found |= {f"tree {fan_out}": tree(nodes, size, fan_out) for fan_out in fan_outs}
    return found | ({"ring": ring(nodes, size)} if len(nodes) > 1 else {})


def candidates(nodes: Sequence[str], size: int) -> dict[str, tuple[ReductionTree, ...]]:
    """Return all reductions that the model chooses from, by name; one node has a star alone."""
    found = {"star": star(nodes, size)}
    if len(nodes) > 1:
        fan_outs = [fan_out for fan_out in _FAN_OUTS if fan_out < len(nodes)]
        found |= {f"tree {fan_out}": tree(nodes, size, fan_out) for fan_out in fan_outs}
        found["ring"] = ring(nodes, size)
    return found


def choose(nodes: Sequence[str], size: int, network: Network, topology: str = "auto") -> Prediction:
    """Return the fastest reduction by prediction, of one ``topology`` unless that is "auto". Raises
    ValueError for an unknown one.
    """
    return fastest(candidates(nodes, size), network, topology)


def fastest(
    reductions: Mapping[str, tuple[ReductionTree, ...]], network: Network, topology: str = "auto"
) -> Prediction:
    """Return the fastest of some reductions by prediction, see ``choose``. Raises ValueError."""
    if topology not in TOPOLOGIES:
        raise ValueError(f"'{topology}' is none of {', '.join(TOPOLOGIES)}")
    named = {name: trees for name, trees in reductions.items() if name.split()[0] == topology}
    found = [predict(name, trees, network) for name, trees in (named or reductions).items()]
    return min(found, key=lambda each: each.seconds)
