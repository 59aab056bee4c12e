# SPDX-License-Identifier: Apache-2.0
"""The context in which one loop of an engine runs, and the observation of its effects."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from millpond.tunnel.addresses import Address, IPAddress, Network, peer_of
from millpond.tunnel.datapath.packet_filter import PacketFilter
from millpond.tunnel.datapath.stats import PacketStats
from millpond.tunnel.ring.layout import RECV, SEND
from millpond.tunnel.ring.link_params import ALL_OFFLOADS, VNET_HEADER

LOOPS = {
    "submit_packets": ("host", 0, SEND),
    "deliver_receives": ("host", 1, RECV),
    "answer_receives": ("device", 0, RECV),
    "execute_sends": ("device", 1, SEND),
}
"""Role, place among the role's loops, queue."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a loop runs with. The region has ``spare`` entries beyond those in use."""

    loop: str
    depth: int = 8
    spare: int = 0
    address: str = "10.77.0.1/30"
    vnet_header: int = VNET_HEADER
    register: bool = False
    """Whether the peer's notifier is a device register."""
    peers: str = ""
    """The network that the device may speak with; none for the host alone."""
    offloads: int = ALL_OFFLOADS

    @property
    def gate(self) -> PacketFilter:
        """The filter of its packets."""
        role = LOOPS[self.loop][0]
        return PacketFilter(self.own, self.vnet_header, role, self.network, self.offloads)

    @property
    def network(self) -> Network | None:
        return ipaddress.ip_network(self.peers) if self.peers else None

    def ends(self) -> tuple[Network, Network]:
        """Where packets may come from, and where they may go."""
        exact: tuple[Network, Network] = ipaddress.ip_network(self.peer), ipaddress.ip_network(self.own.ip)
        if self.network is None:
            return exact
        return (exact[0], self.network) if LOOPS[self.loop][0] == "host" else (self.network, exact[1])

    @property
    def own(self) -> Address:
        return ipaddress.ip_interface(self.address)

    @property
    def peer(self) -> IPAddress:
        return peer_of(self.own)


@dataclass(frozen=True, slots=True)
class Observation:
    """What a loop at rest has done, besides taking time."""

    verdict: tuple[str, str] | None
    delivered: tuple[bytes, ...]
    counts: PacketStats
    rung: int
    armed: int
    region: bytearray

    def difference(self, other: Observation) -> str:
        """Where another one did something else."""
        for name in ("verdict", "counts", "rung", "armed"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)} and {getattr(other, name)}"
        if self.delivered != other.delivered:
            return f"delivered: {_outline(self.delivered)} and {_outline(other.delivered)}"
        if self.region == other.region:
            return ""
        pairs = enumerate(zip(self.region, other.region, strict=True))
        where = [offset for offset, (one, two) in pairs if one != two]
        return f"the region at {where[0]:#x} and {len(where)} bytes in all"


def _outline(packets: tuple[bytes, ...]) -> list[tuple[int, str]]:
    return [(len(packet), packet[:52].hex()) for packet in packets]
