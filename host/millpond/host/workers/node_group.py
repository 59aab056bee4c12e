# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): the reduction nodes of a group of devices, and the rates of the links between them.

The group has an authority of its own, which no other group knows: its certificates are the host's word that
the nodes may talk to each other.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

from millpond.aggregate.messages import LinkProbed, NodeReady, ProbeLink, SetPeers, StartNode
from millpond.aggregate.node import probe
from millpond.aggregate.progress import STALL_SECONDS
from millpond.aggregate.topology import SINK, Network, NetworkLink, ReductionTree
from millpond.base.deadline import Deadline
from millpond.base.errors import ProtocolError, RemoteError
from millpond.host.fleet.addresses import PORTS
from millpond.host.fleet.authority import Authority
from millpond.host.workers.node_control import NodeControl
from millpond.wire.channel import Channel

START_SECONDS = 30.0
PROBE_BYTES = 1 << 20
"""The bytes of a probe of one link, which take 8 ms at 1 Gbit/s."""
_REPLY_SECONDS = 10.0
_PROBES = 3
_STREAMS = 4
"""Streams from each node, for what the links share where trees run side by side."""
T = TypeVar("T")


@dataclass(slots=True)
class _Member:
    control: NodeControl
    ready: NodeReady
    parents: tuple[str, ...] = ()
    told: SetPeers | None = None


class NodeGroup:
    """Nodes of vectors of ``size`` values. Call from one thread; ``dial`` from any."""

    def __init__(self, size: int) -> None:
        self._size, self._authority = size, Authority.make("millpond reduction nodes")
        self._members: dict[str, _Member] = {}

    @property
    def on_lan(self) -> bool:
        """Whether all nodes are on a network of the devices' own."""
        return all(member.ready.lan for member in self._members.values())

    def join(self, controls: Mapping[str, NodeControl]) -> bool:
        """Have nodes on these devices, too, which know all others. Returns whether any is new. Raises
        RemoteError if a node cannot be had.
        """
        new = {
            name: control
            for name, control in controls.items()
            if name not in self._members or self._members[name].control is not control
        }
        started = _side_by_side([partial(self._start, name, control) for name, control in new.items()])
        self._members |= dict(zip(new, started, strict=True))
        self._tell(controls)
        return bool(new)

    def set_trees(self, names: Sequence[str], trees: Sequence[ReductionTree]) -> None:
        """Let some nodes answer their parents in these trees alone. Raises RemoteError."""
        for name in names:
            above = {parent for tree in trees for parent, below in tree.children.items() if name in below}
            self._members[name].parents = tuple(sorted(above - {SINK}))
        self._tell(names)

    def _tell(self, names: Iterable[str]) -> None:
        """Tell nodes their peers and parents, those to which something else was told."""
        places = {name: (each.ready.address, each.ready.port) for name, each in self._members.items()}
        for member in (self._members[name] for name in names):
            peers = SetPeers(places, member.parents)
            if member.told != peers:
                member.control.allow(peers, Deadline.after(_REPLY_SECONDS))
                member.told = peers

    def _start(self, name: str, control: NodeControl) -> _Member:
        certificate, key = (text.decode() for text in self._authority.sign(name))
        request = StartNode(self._authority.pem.decode(), certificate, key, self._size)
        ready = control.start(request, Deadline.after(START_SECONDS))
        if ready.port not in PORTS:  # which other devices are going to connect to
            raise ProtocolError(f"{name} has its node at port {ready.port}, which is no node's")
        return _Member(control, ready)

    def dial(self, name: str) -> Channel:
        """Return a connection with a node. Raises RemoteError."""
        if name not in self._members:
            raise RemoteError(f"{name} has no node")
        return self._members[name].control.connect(Deadline.after(_REPLY_SECONDS))

    def network(self, names: Sequence[str], size: int = PROBE_BYTES) -> Network:
        """Measure the links of some nodes with probes of ``size`` bytes. Raises RemoteError.

        The uplinks are measured one by one, and together for what the sink takes; the links between nodes
        from each node to the next one, one by one, and together for what they share.
        """
        with contextlib.ExitStack() as stack:
            channels = {name: stack.enter_context(self.dial(name)) for name in names}
            if len(names) == 1:
                uplink = _link(partial(probe, channels[names[0]], names[0], size), size)
                return Network({SINK: uplink, names[0]: uplink})
            pairs = list(zip(names, [*names[1:], names[0]], strict=True))
            own = {name: partial(probe, channels[name], name, size) for name in names}
            between = {
                source: partial(_probe_between, channels[target], target, source, size)
                for target, source in pairs
            }
            for action in between.values():  # connects
                action()
            uplinks = {name: _link(action, size) for name, action in own.items()}
            links = {name: _link(action, size) for name, action in between.items()}
            sink, shared = (_rate([*actions.values()], size) for actions in (own, between))
            alone = sum(link.out for link in links.values())
            limited = shared <= 0.9 * alone
            many = self._rate_of_streams(pairs, size) if limited else 0.0
        latency = max(link.latency for link in uplinks.values())
        found = links | {SINK: NetworkLink(sink, sink, latency)}
        return Network(found, shared if limited else math.inf, many, uplinks)

    def _rate_of_streams(self, pairs: Sequence[tuple[str, str]], size: int) -> float:
        """Return the bytes per second of several probes from each node to the next one, side by side."""
        with contextlib.ExitStack() as stack:
            dialled = [(stack.enter_context(self.dial(b)), b, a) for _ in range(_STREAMS) for b, a in pairs]
            actions = [partial(_probe_between, *each, size) for each in dialled]
            _side_by_side(actions)  # connects
            return _rate(actions, size)


def _probe_between(channel: Channel, target: str, source: str, size: int) -> LinkProbed:
    """Have a node time the bytes of another one. Raises RemoteError."""
    channel.send(ProbeLink(target, size, source), Deadline.after(STALL_SECONDS))
    return channel.expect(LinkProbed, Deadline.after(2 * STALL_SECONDS))


def _link(action: Callable[[], LinkProbed], size: int) -> NetworkLink:
    probes = [action() for _ in range(_PROBES)]
    seconds = median(each.seconds - each.first for each in probes)
    rate = size / max(seconds, 1e-9)
    return NetworkLink(rate, rate, min(each.first for each in probes) / 2)


def _rate(actions: Sequence[Callable[[], LinkProbed]], size: int) -> float:
    """Return the bytes per second of probes that run side by side."""
    began = time.monotonic()
    _side_by_side(actions)
    return len(actions) * size / (time.monotonic() - began)


def _side_by_side(actions: Sequence[Callable[[], T]]) -> list[T]:
    if not actions:
        return []
    with ThreadPoolExecutor(len(actions), "nodes") as pool:
        return [each.result() for each in [pool.submit(action) for action in actions]]
