# SPDX-License-Identifier: Apache-2.0
"""Pure: reductions over the devices of several hosts in two levels, a tree of trees, and in one.

*Two levels*: each fleet's devices are reduced to their host, as ``topology`` has it; when a fleet's mean is
whole, the hosts reduce the means among themselves, over their links to each other, in a star, a tree or a
ring whose roots are hosts; the result goes the same way back. Levels follow each other::

    seconds = max over fleets(reduce) + reduce(hosts) + spread(hosts) + max over fleets(spread)

Each term is the prediction of ``topology``, which follows FireCaffe's equations 3 and 4 (section 6). A host's
link carries one vector for its fleet, however many devices this has. With one host there is one level.

*One level*: all devices are peers, wherever they are. In a star, FireCaffe's equation 3 with the links of the
hosts in between, the first host's link carries the vectors of all devices of other hosts. In a ring, as gloo
and NCCL have it, 2 * (p - 1) steps each pass 1/p of the vector to the next rank (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms", 2009, section 3), and ranks of one host follow each other::

    seconds = 2 * (p - 1) * (size / p / slowest rate + hop)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from millpond.aggregate import topology
from millpond.aggregate.topology import SINK, VALUE_BYTES, Network, NetworkLink, Prediction

_NO_LINK = NetworkLink(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class HostedFleet:
    """The ``devices`` of a host, at least one; the network ``inside``, whose SINK is the host; and the host's
    ``link`` to other hosts.
    """

    devices: tuple[str, ...]
    inside: Network
    link: NetworkLink


@dataclass(frozen=True, slots=True)
class TwoLevels:
    """The predicted reductions ``inside`` each fleet, by host, and ``over`` the hosts: None for one host."""

    inside: Mapping[str, Prediction]
    over: Prediction | None

    @property
    def reduce(self) -> float:
        """The seconds until the sums are where the roots of the hosts' trees are."""
        return max(each.reduce for each in self.inside.values()) + (self.over.reduce if self.over else 0.0)

    @property
    def spread(self) -> float:
        """The seconds of the way back to all devices."""
        return max(each.spread for each in self.inside.values()) + (self.over.spread if self.over else 0.0)

    @property
    def seconds(self) -> float:
        """The seconds of both."""
        return self.reduce + self.spread


def choose_levels(
    hosts: Mapping[str, HostedFleet], size: int, *, inside: str = "auto", over: str = "auto"
) -> TwoLevels:
    """Return the fastest reductions of ``size`` values by prediction, ``inside`` each fleet and ``over`` the
    hosts, of these topologies unless they are "auto". Raises ValueError for no host and an unknown topology.
    """
    if not hosts:
        raise ValueError("a reduction needs a host")
    alike: dict[tuple[tuple[str, ...], int], Prediction] = {}
    chosen = {}
    for name, fleet in hosts.items():
        key = fleet.devices, id(fleet.inside)
        if key not in alike:
            alike[key] = topology.choose(fleet.devices, size, fleet.inside, inside)
        chosen[name] = alike[key]
    return TwoLevels(chosen, _over(hosts, size, over) if len(hosts) > 1 else None)


def _over(hosts: Mapping[str, HostedFleet], size: int, chosen: str) -> Prediction:
    """Return the fastest reduction among hosts: a root keeps the result, so its way to the sink is none."""
    links = {name: fleet.link for name, fleet in hosts.items()}
    network = Network({**links, SINK: _NO_LINK}, uplinks=dict.fromkeys(hosts, _NO_LINK))
    return topology.fastest(topology.below_one(list(hosts), size), network, chosen)


def flat_star_seconds(hosts: Mapping[str, HostedFleet], size: int) -> float:
    """Return the seconds in which the first host gets ``size`` values of each device, of other hosts by way
    of theirs, and sends as many to each.
    """
    return _star(hosts, size * VALUE_BYTES, upwards=True) + _star(hosts, size * VALUE_BYTES, upwards=False)


def _star(hosts: Mapping[str, HostedFleet], volume: float, *, upwards: bool) -> float:
    first, *others = hosts.values()
    away = sum(len(fleet.devices) for fleet in others)
    seconds = [volume * len(fleet.devices) / fleet.inside.shared for fleet in hosts.values()]
    for fleet in hosts.values():
        seconds += [
            volume / _rate(fleet.inside.link(*_to_host(fleet, name)), upwards) for name in fleet.devices
        ]
    seconds += [volume * len(fleet.devices) / _rate(fleet.link, upwards) for fleet in others]
    seconds.append(volume * away / _rate(first.link, not upwards))
    seconds.append(volume * (away + len(first.devices)) / _rate(first.inside.links[SINK], not upwards))
    return max(seconds) + _hop(hosts)


def flat_ring_seconds(hosts: Mapping[str, HostedFleet], size: int) -> float:
    """Return the seconds of a ring all-reduce of ``size`` values over all devices, host by host."""
    ranks = sum(len(fleet.devices) for fleet in hosts.values())
    part = size * VALUE_BYTES / ranks
    links = [link for f in hosts.values() for name, link in f.inside.links.items() if name in f.devices]
    links += [fleet.link for fleet in hosts.values()] if len(hosts) > 1 else []
    slowest = min(min(link.to, link.out) for link in links)
    shared = max(len(fleet.devices) / fleet.inside.shared for fleet in hosts.values())
    return 2 * (ranks - 1) * (part * max(1 / slowest, shared) + _hop(hosts))


def _hop(hosts: Mapping[str, HostedFleet]) -> float:
    """Return the longest latency between two devices, or a device and a host."""
    inside = max(link.latency for fleet in hosts.values() for link in fleet.inside.links.values())
    return inside + (max(fleet.link.latency for fleet in hosts.values()) if len(hosts) > 1 else 0.0)


def _to_host(fleet: HostedFleet, device: str) -> tuple[str, bool]:
    return device, device in fleet.inside.uplinks


def _rate(link: NetworkLink, outwards: bool) -> float:
    return link.out if outwards else link.to
