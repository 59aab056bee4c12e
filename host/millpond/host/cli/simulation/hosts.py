# SPDX-License-Identifier: Apache-2.0
"""Pure: the table ``[hosts]`` of a simulated fleet: how many like it, and the seconds of their exchange."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from millpond.aggregate import levels
from millpond.aggregate.levels import HostedFleet
from millpond.aggregate.topology import SINK, Network, NetworkLink
from millpond.base.keys import Key

MOST_HOSTS = 1000
Exchange = Literal["two-levels", "flat-ring", "flat-star"]
_Positive = Annotated[float, Key(least=1e-6, most=1e9)]
_Latency = Annotated[float, Key(least=0.0, most=1e9)]
_BYTES = 1e9 / 8  # per second, of a Gbit/s


@dataclass(frozen=True, slots=True)
class Hosts:
    """``count`` hosts, each with all the workers of the file, that exchange so many ``values`` in each step.
    Rates are in Gbit/s: of a device's link, of all links of a host's devices together (``bus_gbps``; 0: they
    share nothing), and of a host's link to the others. A link's latency is in microseconds.
    """

    count: Annotated[int, Key(least=1, most=MOST_HOSTS)]
    values: Annotated[int, Key(least=1, most=1 << 40)]
    device_gbps: _Positive
    link_gbps: _Positive
    bus_gbps: Annotated[float, Key(least=0.0, most=1e9)] = 0.0
    device_us: _Latency = 0.0
    link_us: _Latency = 0.0
    exchange: Exchange = "two-levels"


def fleets(hosts: Hosts, devices: int) -> dict[str, HostedFleet]:
    """Return the hosts' fleets, each of so many ``devices`` on links of their own."""
    names = tuple(f"device{number}" for number in range(devices))
    device = _link(hosts.device_gbps, hosts.device_us)
    shared = hosts.bus_gbps * _BYTES or math.inf
    inside = Network({**dict.fromkeys(names, device), SINK: NetworkLink(shared, shared)}, shared)
    fleet = HostedFleet(names, inside, _link(hosts.link_gbps, hosts.link_us))
    return {f"host{number}": fleet for number in range(hosts.count)}


@functools.cache
def exchange_seconds(hosts: Hosts, devices: int) -> float:
    """Return the predicted seconds of an exchange of all hosts' ``devices``, at least one each."""
    found = fleets(hosts, devices)
    if hosts.exchange == "flat-star":
        return levels.flat_star_seconds(found, hosts.values)
    if hosts.exchange == "flat-ring":
        return levels.flat_ring_seconds(found, hosts.values)
    return levels.choose_levels(found, hosts.values).seconds


def _link(gbps: float, microseconds: float) -> NetworkLink:
    return NetworkLink(gbps * _BYTES, gbps * _BYTES, microseconds / 1e6)
