# SPDX-License-Identifier: Apache-2.0
"""Pure: the addresses of the tunnels: a /30 of the fleet's network for each device, the host's end first; and
those of another host's devices, which take part in a launch.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millpond.base.errors import ConfigError
from millpond.base.text import counted
from millpond.wire.control_messages import CONTROL_PORT

PORTS = range(CONTROL_PORT + 1, 65535)
"""Ports that devices of one launch reach on each other: not agents' or SSH's. The kernel takes no 65535."""
_EACH = 4
MOST_NETWORKS = 256
"""Most devices of one other host."""
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of both ends of one device's tunnel, each with its prefix length."""

    host: str
    device: str

    @property
    def device_ip(self) -> str:
        """The device's address alone."""
        return self.device.partition("/")[0]

    @property
    def host_ip(self) -> str:
        """The host's address alone, as this device sees it."""
        return self.host.partition("/")[0]


@dataclass(frozen=True, slots=True)
class PeerLink:
    """The link to another host: by ``interface``, to its address there if that has others, too. Its devices
    are in ``networks``; to them this host has the address ``source``.
    """

    interface: str
    gateway: ipaddress.IPv4Address | None
    networks: tuple[ipaddress.IPv4Network, ...]
    source: ipaddress.IPv4Address


def assign(network: str, recorded: Mapping[str, str]) -> dict[str, Addresses]:
    """Return the addresses of all devices of a fleet by name. A device has the address that is ``recorded``
    for it; one with "" has the first that is free. Raises ConfigError for an address that is none of a
    device's in ``network``, is given twice, or is wanted where none is free.
    """
    whole, taken = _network(network), dict[int, str]()
    for name, address in recorded.items():
        if address and (fault := _take(whole, taken, name, address)):
            raise ConfigError(f"fleet.toml: device: {name}: address: {fault}")
    free = (place for place in range(whole.num_addresses // _EACH) if place not in taken)
    for name in (name for name, address in recorded.items() if not address):
        if (place := next(free, -1)) < 0:
            many = counted(len(recorded), "device")
            raise ConfigError(f"fleet.toml: network: {whole} is too small for {many}")
        taken[place] = name
    places = {name: place for place, name in taken.items()}
    return {name: _at(whole, places[name]) for name in recorded}


def _network(network: str) -> _Network:
    try:
        return ipaddress.ip_network(network)
    except ValueError as error:
        raise ConfigError(f"fleet.toml: network: {error}") from None


def _take(network: _Network, taken: dict[int, str], name: str, address: str) -> str:
    """Give a device the /30 whose device's end is ``address``. Returns why that cannot be, or ""."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError as error:
        return str(error)
    place, end = divmod(int(found) - int(network.network_address), _EACH)
    if end != _EACH // 2 or found not in network:
        first = _at(network, 0).device_ip
        return f"{address} is no device's address in the network {network}, as {first} is"
    if other := taken.get(place):
        return f"{other} has the address {address}, too"
    taken[place] = name
    return ""


def _at(network: _Network, place: int) -> Addresses:
    base = network.network_address + _EACH * place
    return Addresses(f"{base + 1}/30", f"{base + 2}/30")


def networks_of(host: str, texts: Sequence[str], peers: str, own: str) -> tuple[ipaddress.IPv4Network, ...]:
    """Return the networks of another host's devices, which lie in ``peers`` and not in this fleet's ``own``.
    Raises ConfigError.
    """
    if len(texts) > MOST_NETWORKS:
        raise ConfigError(f"{host} has {len(texts)} devices in the launch; {MOST_NETWORKS} are possible")
    try:
        found = tuple(map(ipaddress.IPv4Network, texts))
    except ValueError as error:
        raise ConfigError(f"{host}: {error}") from None
    allowed = ipaddress.IPv4Network(peers)
    for network in found:
        if network.overlaps(ipaddress.IPv4Network(own)):
            raise ConfigError(
                f"{host} has a device in {network}, which is in this fleet's network {own}: each host's "
                "fleet needs a 'network' of its own, and all the same 'peers'"
            )
        if not network.subnet_of(allowed):
            raise ConfigError(
                f"{host} has a device in {network}, which is not in this fleet's 'peers', {allowed}"
            )
    return found
