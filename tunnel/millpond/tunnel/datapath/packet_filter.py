# SPDX-License-Identifier: Apache-2.0
"""Pure: decide which of the peer's packets go to the interface: only those from the peer's own address to
this endpoint's, or, in a tunnel with ``peers``, between the device's address and a whole network; and only
with a vnet header that the negotiated offloads allow.
"""

from __future__ import annotations

import ipaddress

from millpond.tunnel.addresses import Address, Network, peer_of
from millpond.tunnel.datapath import vnet_header as vnet

_ADDRESSES = {4: (12, 4), 6: (8, 16)}
"""Per IP version: where the source address begins, and the bytes of an address; the destination follows."""


class PacketFilter:
    """Checks a private copy of a packet's first bytes, because the peer can still change the original.

    ``role`` is that of this endpoint. With ``peers`` the host's endpoint lets the device speak to all of that
    network, always from its own address; the device's endpoint accepts packets from all of it. ``offloads``
    are the negotiated TUN_F_* bits.
    """

    def __init__(
        self,
        address: Address,
        vnet_header: int,
        role: str = "host",
        peers: Network | None = None,
        offloads: int = 0,
    ) -> None:
        source: Network = ipaddress.ip_network(peer_of(address))
        destination: Network = ipaddress.ip_network(address.ip)
        if peers is not None:
            source, destination = (source, peers) if role == "host" else (peers, destination)
        offset, width = _ADDRESSES[address.version]
        self.version, self.offloads = address.version, offloads
        self.expected = source.network_address.packed + destination.network_address.packed
        self.mask = source.netmask.packed + destination.netmask.packed
        """Bits of both addresses that must be as expected."""
        self.head = vnet_header + offset + 2 * width
        """Bytes to copy: vnet header and IP header up to the destination's end."""
        self.vnet_header, self.start = vnet_header, vnet_header + offset
        self.wanted, self.bits = int.from_bytes(self.expected), int.from_bytes(self.mask)
        """Both as numbers, which is how they are compared."""
        self._width = 8 * width
        self._version = address.version << 4

    def verdict(self, head: bytes, size: int) -> str | None:
        """Return None to pass the packet, or the cause of its drop, a field of PacketStats; ``head`` has up
        to ``self.head`` bytes of the packet's ``size``.
        """
        if len(head) < self.head or head[self.vnet_header] & 0xF0 != self._version:
            return "malformed"
        wrong = int.from_bytes(head[self.start :]) & self.bits ^ self.wanted
        if not wrong:
            allowed = vnet.is_allowed(head, self.vnet_header, size, self.offloads)
            return None if allowed else "malformed"
        return "foreign_source" if wrong >> self._width else "foreign_destination"
