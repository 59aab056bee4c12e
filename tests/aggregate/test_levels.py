# SPDX-License-Identifier: Apache-2.0
"""Reductions over several hosts, in two levels and in one."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.aggregate import levels, topology
from millpond.aggregate.levels import HostedFleet
from millpond.aggregate.topology import SINK, VALUE_BYTES, Network, NetworkLink

SIZE = 1_000_000
W = SIZE * VALUE_BYTES
FAST = NetworkLink(math.inf, math.inf)


def fleet(devices: int, rate: float, link: NetworkLink) -> HostedFleet:
    names = tuple(f"d{number}" for number in range(devices))
    return HostedFleet(names, Network({**dict.fromkeys(names, NetworkLink(rate, rate)), SINK: FAST}), link)


def hosts(count: int, devices: int = 4, rate: float = 1e6, link: float = 1e6) -> dict[str, HostedFleet]:
    return {f"h{number}": fleet(devices, rate, NetworkLink(link, link)) for number in range(count)}


rates = st.floats(1e5, 1e10)
some_hosts = st.lists(
    st.builds(fleet, st.integers(1, 9), rates, st.builds(NetworkLink, rates, rates)), max_size=7
)


@given(st.integers(1, 40), rates, st.sampled_from(topology.TOPOLOGIES))
def test_one_host_is_one_level(devices: int, rate: float, kind: str) -> None:
    only = fleet(devices, rate, NetworkLink(1.0, 1.0))
    found = levels.choose_levels({"h0": only}, SIZE, inside=kind)
    alone = topology.choose(only.devices, SIZE, only.inside, kind)
    assert (found.over, found.inside["h0"], found.seconds) == (None, alone, alone.seconds)


@given(some_hosts.filter(lambda found: len(found) > 1), st.sampled_from(topology.TOPOLOGIES))
def test_no_reduction_beats_its_slowest_links(fleets: list[HostedFleet], kind: str) -> None:
    named = {f"h{number}": each for number, each in enumerate(fleets)}
    found = levels.choose_levels(named, SIZE, over=kind)
    least = W * (len(fleets) - 1) / len(fleets)  # each host's link carries as much in all, in and out
    over = max(least / max(each.link.to, each.link.out) for each in fleets)
    inside = max(W / link.out for each in fleets for link in (each.inside.links[each.devices[0]],))
    assert found.reduce >= 0.999 * (over / 2 + inside) and found.spread >= 0.999 * (over / 2 + inside)
    assert levels.flat_star_seconds(named, SIZE) >= 0.999 * 2 * inside
    assert levels.flat_ring_seconds(named, SIZE) >= 0.999 * 2 * over


def test_two_hosts_by_hand() -> None:
    """Star inside: W over a device's link each way; over the hosts a star of two, W over a link each way."""
    found = levels.choose_levels(hosts(2), SIZE, inside="star", over="star")
    hop = topology.RANGE_VALUES * topology.SUM_BYTES / 1e6
    assert found.reduce == pytest.approx(W / 1e6 + W / 1e6 + hop)
    slow_away = hosts(2, link=1e5)
    assert levels.flat_star_seconds(slow_away, SIZE) == pytest.approx(2 * 4 * W / 1e5)
    assert levels.flat_ring_seconds(slow_away, SIZE) == pytest.approx(2 * 7 * W / 8 / 1e5)


def test_the_slowest_fleet_and_link_decide() -> None:
    def seconds(found: Mapping[str, HostedFleet]) -> float:
        return levels.choose_levels(found, SIZE, inside="star").seconds

    even = hosts(3)
    assert seconds({**even, "h1": fleet(4, 5e5, NetworkLink(1e6, 1e6))}) - seconds(even) == pytest.approx(
        2 * W / 1e6
    )
    assert seconds({**even, "h1": fleet(4, 1e6, NetworkLink(5e5, 5e5))}) > seconds(even)


def test_two_levels_spare_the_links_of_hosts_and_the_hops_of_many() -> None:
    """A flat star sends 36 vectors over each host's link; a flat ring has 718 hops, two levels a few."""
    many = hosts(10, 36, rate=1e9, link=1e9)
    two = levels.choose_levels(many, SIZE).seconds
    assert two < levels.flat_star_seconds(many, SIZE) / 10
    far = {name: fleet(36, 1e9, NetworkLink(1e9, 1e9, 1e-3)) for name in many}
    assert levels.choose_levels(far, SIZE).seconds < levels.flat_ring_seconds(far, SIZE) / 10


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a host"):
        levels.choose_levels({}, SIZE)
    with pytest.raises(ValueError, match="'mesh' is none of"):
        levels.choose_levels(hosts(2), SIZE, over="mesh")


def test_a_chain_may_be_longer_than_the_stack() -> None:
    names = [f"n{number}" for number in range(5000)]
    assert topology.tree(names, SIZE, 1)[0].levels() == 5000
