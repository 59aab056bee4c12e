# SPDX-License-Identifier: Apache-2.0
"""Edge (namespaces): figure 4 of FireCaffe: 30 MB of gradients summed by a parameter server and by trees,
measured over shaped links up to 16 nodes, predicted up to 128.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from bench.aggregate.topology import EMULATION, RATE, Plan, measured, names
from bench.experiment import Line, Panel, Role, Run
from bench.papers.exhibit import Shown, Value, computed
from bench.papers.exhibit import measured as row
from millpond.aggregate import topology
from millpond.aggregate.topology import SINK, Network, NetworkLink, ReductionTree

VALUES = 7_595_176
"""Those of Network in Network: 30 MB."""
_SIZE = 4 * VALUES
_COUNTS, _PREDICTED = (2, 4, 8, 16), (2, 4, 8, 16, 32, 64, 128)
_LATENCY = 0.001
_STAR, _CHAIN, _HEAP, _BINOMIAL = "star", "tree 1", "tree 2", "binomial"


def binomial(nodes: Sequence[str], size: int) -> tuple[ReductionTree, ...]:
    """Return a binomial tree: the parent of node i is i without its lowest bit."""
    children: dict[str, tuple[str, ...]] = {SINK: (nodes[0],)}
    for number, node in enumerate(nodes[1:], 1):
        parent = nodes[number & (number - 1)]
        children[parent] = (*children.get(parent, ()), node)
    return (ReductionTree(0, size, children),)


def reductions(nodes: Sequence[str], size: int) -> Mapping[str, tuple[ReductionTree, ...]]:
    """Return the reductions of the figure: a server, our chain and heap, and the paper's binomial tree."""
    return {
        _STAR: topology.star(nodes, size),
        _CHAIN: topology.tree(nodes, size, 1),
        _HEAP: topology.tree(nodes, size, 2),
        _BINOMIAL: binomial(nodes, size),
    }


def predicted(count: int) -> dict[str, float]:
    """Return the seconds that our model predicts for links of one rate, there and back."""
    nodes = names(count)
    network = Network({name: NetworkLink(RATE, RATE, _LATENCY) for name in (SINK, *nodes)})
    found = reductions(nodes, VALUES)
    return {name: topology.predict(name, trees, network).seconds for name, trees in found.items()}


def figure_4(run: Run) -> Shown:
    """Measure all reductions, and show them beside both equations."""
    counts = _COUNTS[:2] if run.quick else _COUNTS
    plan = Plan(counts, VALUES // 16 if run.quick else VALUES, reductions)
    once = Run(run.quick, run.say)  # a server of 16 nodes takes 80 s
    seconds, _ = measured(once, plan)
    scale = VALUES / plan.values
    found = {
        int(count): {name: [scale * value for value in values] for name, values in of_count.items()}
        for count, of_count in seconds.items()
    }
    rows = [each for count, of_count in found.items() for each in _rows(count, of_count)]
    for count in _PREDICTED[len(counts) :]:
        rows += _predictions(count)
    return Shown(
        tuple(rows),
        f"{EMULATION}, where the paper's are of the Titan supercomputer"
        + ("; the time of a sixteenth of the vector, times 16" if run.quick else ""),
        "The paper prints no numbers of this figure, only that a tree grows with log2(p) and a server "
        "with p: its column is computed by its equations 3 and 4 for the links used here. Equation 3 is for "
        "one direction; our vectors go there and back, one after the other. Our nodes pass on ranges as "
        "they come, where equation 4 is for nodes that wait for whole vectors. The better of heap "
        "and chain, of which our model chooses, is as fast as the binomial tree or faster, so that tree is "
        "a formula and a measurement here, and no topology that a job can name. Predictions "
        "beyond the measured nodes are for nodes with processors of their own; the measured nodes share "
        "those of one machine, which costs a chain of many nodes most.",
        (_panel(found),),
    )


def _rows(count: int, found: Mapping[str, Sequence[float]]) -> list[Value]:
    three = topology.parameter_server_seconds(_SIZE, count, RATE)
    four = topology.reduction_tree_seconds(_SIZE, count, RATE)
    trees = [name for name in found if name != _STAR]
    best = min(trees, key=lambda name: statistics.median(found[name]))
    pairs = zip(found[_STAR], found[best], strict=True)
    return [
        row(f"{count} nodes, parameter server (paper: equation 3)", "s", round(three, 2), found[_STAR]),
        row(f"{count} nodes, binomial tree (paper: equation 4)", "s", round(four, 2), found[_BINOMIAL]),
        *(row(f"{count} nodes, {_named(name)}", "s", None, found[name]) for name in (_CHAIN, _HEAP)),
        row(
            f"{count} nodes, server over the best tree, {_named(best)} (paper: equation 3 over 4)",
            "x",
            round(three / four, 2),
            [star / tree for star, tree in pairs],
        ),
    ]


def _predictions(count: int) -> list[Value]:
    ours = predicted(count)
    three = topology.parameter_server_seconds(_SIZE, count, RATE)
    four = topology.reduction_tree_seconds(_SIZE, count, RATE)
    best = min((name for name in ours if name != _STAR), key=ours.__getitem__)
    return [
        computed(f"{count} nodes, server, predicted (paper: equation 3)", "s", round(three, 2), ours[_STAR]),
        computed(
            f"{count} nodes, best tree, {_named(best)}, predicted (paper: equation 4)",
            "s",
            round(four, 2),
            ours[best],
        ),
    ]


def _named(name: str) -> str:
    return {_CHAIN: "chain", _HEAP: "heap of two children"}.get(name, f"{name} tree")


def _panel(found: Mapping[int, Mapping[str, Sequence[float]]]) -> Panel:
    model = {count: predicted(count) for count in _PREDICTED}
    three = [topology.parameter_server_seconds(_SIZE, count, RATE) for count in _PREDICTED]
    four = [topology.reduction_tree_seconds(_SIZE, count, RATE) for count in _PREDICTED]
    lines = [
        Line("paper", "parameter server, equation 3", _PREDICTED, three),
        Line("paper", "reduction tree, equation 4", _PREDICTED, four, faint=True),
    ]
    roles: dict[str, Role] = {_STAR: "untuned", _CHAIN: "millpond", _BINOMIAL: "peer"}
    for name, role in roles.items():
        label = "server" if name == _STAR else _named(name)
        medians = [statistics.median(of_count[name]) for of_count in found.values()]
        ours = [model[count][name] for count in _PREDICTED]
        lines.append(Line(role, f"{label}, measured", [*found], medians, marks=True))
        lines.append(Line(role, f"{label}, our model", _PREDICTED, ours, faint=True))
    return Panel("Communication of 30 MB", "number of nodes", "seconds", tuple(lines), logarithmic=True)
