# SPDX-License-Identifier: Apache-2.0
"""Pure: compute and check the addresses of a tunnel: of its two endpoints, and of its peers network."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface


IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def peer_of(address: Address) -> IPAddress:
    """Return the other address of a network of two: a /30, /31 or /127. Raises ValueError for others."""
    hosts: list[IPAddress] = list(address.network.hosts()) if address.network.num_addresses <= 4 else []
    if len(hosts) != 2 or address.ip not in hosts:
        raise ValueError(
            f"{address} does not leave one address for the peer: a tunnel has a /30, /31 or /127"
        )
    return hosts[1 - hosts.index(address.ip)]


def check_peers(address: Address, peers: Network) -> None:
    """Check the peers network of a tunnel with this address. Raises ValueError if it cannot have it."""
    if not isinstance(peers, ipaddress.IPv4Network) or not isinstance(address, ipaddress.IPv4Interface):
        raise ValueError("peers are an IPv4 network")
    if not address.network.subnet_of(peers):
        raise ValueError(f"the peers {peers} do not include the tunnel's own network {address.network}")
