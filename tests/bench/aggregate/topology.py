# SPDX-License-Identifier: Apache-2.0
"""Edge: reductions by star, tree and ring over shaped links, beside what the model predicts.

Each node is a process in a network namespace of its own, joined by a bridge; token buckets (``tc tbf``) shape
both directions of each link, that of the sink too, as in FireCaffe's figure 4.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from bench.aggregate.lan import DEEP, address, lan
from bench.experiment import Run
from bench.rows import Row, summary
from bench.tunnel.namespace import Namespace
from millpond.aggregate import topology
from millpond.aggregate.kernels import Vector
from millpond.aggregate.messages import LinkProbed, ProbeLink
from millpond.aggregate.node import ReductionNode
from millpond.aggregate.topology import SINK, Network, NetworkLink, ReductionTree
from millpond.aggregate.tree_client import TreeReduction
from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError
from millpond.wire.channel import Channel

RATE = 25e6  # bytes per second: 200 Mbit/s
VALUES = 1_000_000
_PROBE_BYTES, _PROBES, _STREAMS = 1 << 20, 5, 4
_COUNTS = (2, 4, 8, 16)
PORT = 7000
EMULATION = "nodes are processes in namespaces of one machine; links are shaped by tc tbf to 200 Mbit/s"
Links = dict[str, tuple[float, float, float]]
Shared = dict[
    str, list[float]
]  # bytes per second of all links together, by number of nodes: one stream, many
Seconds = dict[str, dict[str, list[float]]]  # by number of nodes, topology


TITLE = "star, tree and ring over shaped links"


def measure(run: Run) -> list[Row]:
    """Measure all topologies with 2 to 16 nodes."""
    plan = Plan(_COUNTS[:2] if run.quick else _COUNTS, VALUES, topology.candidates)
    seconds, predicted = measured(run, plan)
    return list(_figures(seconds, predicted))


@dataclass(frozen=True, slots=True)
class Plan:
    """The numbers of nodes, the values of a vector, and the ``reductions`` by nodes and values, by name."""

    counts: Sequence[int]
    values: int
    reductions: Callable[[Sequence[str], int], Mapping[str, tuple[ReductionTree, ...]]]


def measured(run: Run, plan: Plan) -> tuple[Seconds, Mapping[str, Mapping[str, float]]]:
    """Return the measured seconds of all reductions, and the predicted ones. Says both."""
    links, shared, seconds = _measure(run.repeats, plan)
    predicted = {
        count: {
            name: topology.predict(name, trees, _network(links, shared, int(count))).seconds
            for name, trees in plan.reductions(names(int(count)), plan.values).items()
        }
        for count in seconds
    }
    for count, found in seconds.items():
        for name, repeats in found.items():
            middle = statistics.median(repeats)
            run.say(f"{count:>2} nodes, {name:8} {middle:6.2f} s, predicted {predicted[count][name]:6.2f} s")
    return seconds, predicted


def _figures(seconds: Seconds, predicted: Mapping[str, Mapping[str, float]]) -> Iterator[Row]:
    common = {"peer": "a star over the same links", "emulation": EMULATION}
    most = max(seconds, key=int)
    chosen = {count: min(found, key=found.__getitem__) for count, found in predicted.items()}
    tree = min((name for name in predicted[most] if name.startswith("tree")), key=predicted[most].__getitem__)
    ratios = [star / other for star, other in zip(seconds[most]["star"], seconds[most][tree], strict=True)]
    about = f"seconds of a star over those of the chosen tree ({tree}), {most} nodes, {VALUES} values"
    yield summary(f"tree_over_star_{most}", about, ratios, "x", **common)
    medians = {c: {n: statistics.median(v) for n, v in found.items()} for c, found in seconds.items()}
    worst = max(medians, key=lambda count: medians[count][chosen[count]] / min(medians[count].values()))
    best = min(medians[worst], key=medians[worst].__getitem__)
    over = [a / b for a, b in zip(seconds[worst][chosen[worst]], seconds[worst][best], strict=True)]
    about = f"the chosen topology ({chosen[worst]}) over the best ({best}), worst number of nodes ({worst})"
    yield summary("auto_over_best", about, over, "x", **{**common, "peer": None})
    pairs = [(predicted[c][name], median) for c, found in medians.items() for name, median in found.items()]
    errors = sorted(abs(expected / median - 1) for expected, median in pairs)
    about = "error of the predicted seconds, median, least and most of all topologies and numbers of nodes"
    yield summary("model_error", about, errors, "", **{**common, "peer": None})


def names(count: int) -> list[str]:
    """Return the names of so many nodes."""
    return [f"n{number}" for number in range(count)]


def _network(links: Links, shared: Shared, count: int) -> Network:
    """Return the network of some nodes. What links reach together counts where it is less than alone."""
    found = {name: NetworkLink(*links[name]) for name in [SINK, *names(count)]}
    alone = sum(found[name].out for name in names(count))
    one, many = (rate if rate < 0.9 * alone else math.inf for rate in shared[str(count)])
    return Network(found, one, many)


def _address(name: str) -> str:
    return address(1 + int(name[1:]) if name else 0)


@contextlib.contextmanager
def _forked(run: Callable[[], None], namespace: Namespace) -> Iterator[int]:
    """Run a function in a process in a namespace, which is killed at the end."""
    pid = os.fork()
    if not pid:
        with contextlib.ExitStack() as last:
            last.callback(os._exit, 1)  # behind a traceback, too
            last.callback(traceback.print_exc)
            with namespace.entered():
                run()
            os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _measure(repeats: int, plan: Plan) -> tuple[Links, Shared, Seconds]:
    every = names(max(plan.counts))
    with lan(1 + len(every), round(8 * RATE / 1e6), DEEP) as network, contextlib.ExitStack() as processes:
        sink, *nodes = network.nodes
        for name, node in zip(every, nodes, strict=True):
            processes.enter_context(_forked(lambda name=name: _run_node(name, plan.values), node))  # type: ignore[misc]
        receiving, sending = os.pipe()  # now, as the nodes would keep it open
        processes.enter_context(_forked(lambda: _run_sink(repeats, plan, sending), sink))
        os.close(sending)
        with os.fdopen(receiving, "rb") as results:
            found = json.loads(results.read())
        expected = repeats * sum(4 * plan.values * 2 * count for count in plan.counts)
        if sum(node.traffic("lan").received for node in network.nodes) < expected:
            raise RuntimeError("the links did not carry the vectors")
    return found["links"], found["shared"], found["seconds"]


def _vector(name: str, values: int) -> Vector:
    return np.random.default_rng(int(name[1:])).normal(size=values).astype(np.float32)


def _dial(name: str) -> Channel:
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            return Channel(socket.create_connection((_address(name), PORT), timeout=10), name)
        time.sleep(0.1)
    raise RuntimeError(f"{name} does not listen")


def _run_node(name: str, values: int) -> None:
    server = socket.create_server((_address(name), PORT), backlog=64)
    vector = _vector(name, values)
    node = ReductionNode(name, vector, vector, _dial)
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_serve, args=(node, Channel(connection, "a parent")), daemon=True).start()


def _serve(node: ReductionNode, channel: Channel) -> None:
    with channel, contextlib.suppress(MillpondError):
        node.serve(channel)


def _run_sink(repeats: int, plan: Plan, results: int) -> None:
    few = min(plan.values, VALUES)
    links = _measured_links(max(plan.counts), few)
    shared = {
        str(count): [_together(names(count), streams) for streams in (1, _STREAMS)] for count in plan.counts
    }
    reductions = {count: plan.reductions(names(count), plan.values) for count in plan.counts}
    seconds: Seconds = {str(count): {name: [] for name in found} for count, found in reductions.items()}
    for _ in range(repeats):
        for count, found in reductions.items():
            for name, trees in found.items():
                first = plan.reductions(names(count), few)[name]
                seconds[str(count)][name].append(_seconds_of(names(count), first, trees))
    with os.fdopen(results, "wb") as file:
        file.write(json.dumps({"links": links, "shared": shared, "seconds": seconds}).encode())


def _seconds_of(
    nodes: Sequence[str], first: tuple[ReductionTree, ...], trees: tuple[ReductionTree, ...]
) -> float:
    """Reduce, and spread the mean, after the ``first`` trees: with them it connects, and windows grow. The
    nodes' vectors become the mean, whose sums are known, too.
    """
    mean = np.empty(trees[-1].stop, np.float32)
    with contextlib.closing(TreeReduction(_dial)) as sink:
        bounds = dict.fromkeys(nodes, (1.0, 100.0))
        began = 0.0
        for reduction in (first, trees):
            own = mean[: reduction[-1].stop]
            began = time.monotonic()
            sink.run(reduction, bounds, float(len(nodes)), own)
            sink.spread(reduction, own)
        return time.monotonic() - began


def _measured_links(count: int, values: int) -> Links:
    """Return the rate to each node, from it, and the latency; for the sink of two nodes at once."""
    found = {name: _link([name], values) for name in names(count)}
    to, out, latency = _link(names(min(count, 4)), values)
    return found | {SINK: (out, to, latency)}


def _link(nodes: Sequence[str], values: int) -> tuple[float, float, float]:
    trees = topology.star(nodes, values)
    bounds = dict.fromkeys(nodes, (1.0, 100.0))
    volume = 4.0 * values * len(nodes)
    with contextlib.closing(TreeReduction(_dial)) as sink:
        mean = np.empty(values, np.float32)
        sink.run(trees, bounds, float(len(nodes)), mean)
        sink.spread(trees, mean)
        latency = (
            min(
                _timed(lambda: sink.run(topology.star(nodes, 1), bounds, 1.0, np.empty(1, np.float32)))
                for _ in range(5)
            )
            / 2
        )
        out = volume / _timed(lambda: sink.run(trees, bounds, float(len(nodes)), mean))
        to = volume / _timed(lambda: sink.spread(trees, mean))
    return to, out, latency


def _together(nodes: Sequence[str], streams: int) -> float:
    """Return the bytes per second of probes from each node to the next one, in so many ``streams`` each."""
    pairs = streams * list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(_dial(target)) for _, target in pairs]

        def _probe(channel: Channel, pair: tuple[str, str]) -> None:
            source, target = pair
            channel.send(ProbeLink(target, _PROBE_BYTES, source), Deadline.after(60))
            channel.expect(LinkProbed, Deadline.after(60))

        with ThreadPoolExecutor(len(pairs)) as pool:
            seconds = [_timed(lambda: list(pool.map(_probe, channels, pairs))) for _ in range(1 + _PROBES)]
    return len(pairs) * _PROBE_BYTES / statistics.median(seconds[1:])  # the first one connects


def _timed(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began
