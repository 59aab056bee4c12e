"""Pure: which packets of the peer go to the interface: only those from its own address to ours."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_ADDRESSES = {4: (12, 4), 6: (8, 16)}
"""Per IP version: where the source address begins, and the bytes of an address; the destination follows."""


def peer_of(address: Address) -> IPAddress:
    """The other address of a tunnel's network, which has two: a /30, /31 or /127. Raises ValueError."""
    hosts: list[IPAddress] = list(address.network.hosts()) if address.network.num_addresses <= 4 else []
    if len(hosts) != 2 or address.ip not in hosts:
        raise ValueError(
            f"{address} does not leave one address for the peer: a tunnel has a /30, /31 or /127"
        )
    return hosts[1 - hosts.index(address.ip)]


class AddressFilter:
    """Checks a private copy of a packet's beginning, because the peer can still change the original."""

    def __init__(self, address: Address, vnet_header: int) -> None:
        peer = peer_of(address)
        offset, width = _ADDRESSES[address.version]
        self.version, self.expected = address.version, peer.packed + address.ip.packed
        self.head = vnet_header + offset + 2 * width
        """Bytes to copy: vnet header and IP header up to the destination's end."""
        self.vnet_header, self._start = vnet_header, vnet_header + offset
        self._middle = self._start + width
        self._version = address.version << 4

    def verdict(self, head: bytes) -> str | None:
        """None to let it pass, or why not, as a field of Counts; ``head`` has up to ``self.head`` bytes."""
        if head[self._start :] == self.expected and head[self.vnet_header] & 0xF0 == self._version:
            return None
        if len(head) < self.head or head[self.vnet_header] & 0xF0 != self._version:
            return "malformed"
        if head[self._start : self._middle] != self.expected[: len(self.expected) // 2]:
            return "foreign_source"
        return "foreign_destination"
