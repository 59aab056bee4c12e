# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): the links between devices, and what reductions over them take, predicted and measured.

The devices add zeros, in nodes like those of jobs.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from statistics import median

import numpy as np

from millpond.aggregate import topology
from millpond.aggregate.topology import Network, ReductionTree
from millpond.aggregate.tree_client import TreeReduction
from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError
from millpond.host.api.topology import GetTopology, LinkInfo, ReductionInfo, TopologyInfo
from millpond.host.fleet.device import Device
from millpond.host.workers.node_control import NodeControl
from millpond.host.workers.node_group import NodeGroup

HOST_STAR = "host"
_CONTROL_SECONDS = 10.0


def report(devices: Mapping[str, Device], request: GetTopology) -> TopologyInfo:
    """Measure the links of devices that can reach each other, and return the reductions over them. Raises
    LocalError and RemoteError.
    """
    if not devices:
        raise LocalError("no device is ready")
    with contextlib.ExitStack() as stack:
        controls = {}
        for name, device in devices.items():
            control = stack.enter_context(device.control(Deadline.after(_CONTROL_SECONDS)))
            controls[name] = NodeControl(device, control)
        group = NodeGroup(request.size)
        group.join(controls)
        names = sorted(devices, key=lambda name: (name != request.root, name))
        network = group.network(names)
        reductions = {HOST_STAR: topology.star(names, request.size)}
        reductions |= topology.below_one(names, request.size)
        rows = []
        for name, trees in reductions.items():
            group.set_trees(names, trees)
            predicted = topology.predict(name, trees, network).seconds
            rows.append(ReductionInfo(name, predicted, _measured(group, trees, request.repeats)))
        shared = None if network.shared == math.inf else network.shared
        rows.sort(key=lambda row: row.predicted)
        return TopologyInfo(_links(network, names), group.on_lan, shared, tuple(rows))


def _links(network: Network, names: list[str]) -> dict[str, LinkInfo]:
    found = {}
    for name in names:
        link, up = network.links[name], network.uplinks.get(name, network.links[name])
        found[name] = LinkInfo(link.out, link.latency, up.out, up.latency)
    return found


def _measured(group: NodeGroup, trees: tuple[ReductionTree, ...], repeats: int) -> float | None:
    """Return the median seconds of reductions and of the way back of their mean, None without repeats."""
    if not repeats:
        return None
    nodes = {name for each in trees for children in each.children.values() for name in children}
    bounds, mean = dict.fromkeys(nodes, (1.0, 1.0)), np.zeros(trees[-1].stop, np.float32)
    seconds = []
    with contextlib.closing(TreeReduction(group.dial)) as sink:
        for _ in range(repeats + 1):
            began = time.perf_counter()
            sink.run(trees, bounds, float(len(nodes)), mean)
            sink.spread(trees, mean)
            seconds.append(time.perf_counter() - began)
    return median(seconds[1:])  # the first one connects
