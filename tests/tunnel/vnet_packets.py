# SPDX-License-Identifier: Apache-2.0
"""Packets behind vnet headers: such as Linux makes, such as it never makes, and random ones near to both."""

from __future__ import annotations

import ipaddress
import random
import struct

from millpond.tunnel.datapath.vnet_header import DATA_VALID, GSO_TCPV4, GSO_TCPV6, NEEDS_CSUM

HEADER = struct.Struct("<BBHHHHH")
TCP, UDP = 6, 17
USO, ECN = 5, 0x80


def vnet(
    flags: int = 0,
    gso: int = 0,
    header: int = 0,
    segment: int = 0,
    start: int = 0,
    offset: int = 0,
    buffers: int = 0,
) -> bytes:
    """The header; by default that of a packet without offloads."""
    return HEADER.pack(flags, gso, header, segment, start, offset, buffers)


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(source: str, destination: str, payload: int, protocol: int = TCP, fragment: int = 0) -> bytes:
    """An IPv4 packet; in its TCP or UDP header the checksum is that of the pseudo header alone, as Linux
    leaves it for others to complete.
    """
    ends = ipaddress.ip_address(source).packed + ipaddress.ip_address(destination).packed
    size = (20 if protocol == TCP else 8) + payload
    partial = ~_checksum(ends + struct.pack(">HH", protocol, size)) & 0xFFFF
    if protocol == TCP:
        transport = struct.pack(">HHIIBBHHH", 9999, 9, 1, 1, 5 << 4, 0x18, 100, partial, 0)
    else:
        transport = struct.pack(">HHHH", 9999, 9, size, partial)
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + size, 1, fragment, 64, protocol, 0) + ends
    head = head[:10] + struct.pack(">H", _checksum(head)) + head[12:]
    return head + transport + bytes(payload)


LARGE, SMALL = 4000, 100
PAYLOADS = (0, 1, 8, SMALL, 1400, LARGE, 60000)
SEGMENTS = {"flags": NEEDS_CSUM, "gso": GSO_TCPV4, "header": 40, "segment": 1000, "start": 20, "offset": 16}
"""Fields of a packet of TCP that is to be cut into segments."""
PARTIAL = {"flags": NEEDS_CSUM, "start": 20, "offset": 16}
"""Fields of one whose checksum is to be completed."""
GOOD = {
    "plain": (vnet(), SMALL),
    "valid": (vnet(DATA_VALID), SMALL),
    "partial": (vnet(**PARTIAL), SMALL),
    "segments": (vnet(**SEGMENTS), LARGE),
    "all of it linear": (vnet(**(SEGMENTS | {"header": LARGE + 40})), LARGE),
    "one buffer": (vnet(buffers=1), SMALL),
}
"""Headers that Linux makes, and the bytes of TCP payload behind each."""
BAD = {
    "an unknown flag": (vnet(4), SMALL),
    "two flags": (vnet(**(PARTIAL | {"flags": 3})), SMALL),
    "a checksum without its flag": (vnet(start=20, offset=16), SMALL),
    "segments without a checksum": (vnet(**(SEGMENTS | {"flags": 0})), LARGE),
    "a checksum in the IP header": (vnet(NEEDS_CSUM, start=0, offset=12), SMALL),
    "a checksum that begins in the IP header": (vnet(NEEDS_CSUM, start=19, offset=16), SMALL),
    "a checksum behind the packet": (vnet(NEEDS_CSUM, start=20, offset=SMALL + 19), SMALL),
    "a start behind the packet": (vnet(NEEDS_CSUM, start=0xFFFF, offset=16), SMALL),
    "a sum that overflows": (vnet(NEEDS_CSUM, start=0xFFF0, offset=0xFFF0), SMALL),
    "a header longer than the packet": (vnet(**(PARTIAL | {"header": SMALL + 41})), SMALL),
    "segments with a header longer than the packet": (vnet(**(SEGMENTS | {"header": LARGE + 41})), LARGE),
    "segments with a header that ends in TCP's": (vnet(**(SEGMENTS | {"header": 39})), LARGE),
    "a segment's size without segments": (vnet(**(PARTIAL | {"segment": 1000})), SMALL),
    "segments of nothing": (vnet(**(SEGMENTS | {"segment": 0})), LARGE),
    "segments of a byte": (vnet(**(SEGMENTS | {"segment": 1})), LARGE),
    "segments by fragments": (vnet(**(SEGMENTS | {"segment": 0xFFFF})), LARGE),
    "segments of the other IP version": (vnet(**(SEGMENTS | {"gso": GSO_TCPV6})), LARGE),
    "segments of UDP": (vnet(**(SEGMENTS | {"gso": USO})), LARGE),
    "segments with ECN": (vnet(**(SEGMENTS | {"gso": GSO_TCPV4 | ECN})), LARGE),
    "segments with another checksum": (vnet(**(SEGMENTS | {"offset": 6})), LARGE),
    "segments behind another header": (vnet(**(SEGMENTS | {"start": 24, "header": 44})), LARGE),
    "many buffers": (vnet(buffers=2), SMALL),
}
"""Headers that Linux never makes with all that the tunnel offers."""


def random_packet(source: str, destination: str, chance: random.Random) -> bytes:
    """A packet from and to there; its header is made by Linux, with some fields changed, or anything."""
    fragment = chance.choice((0, 0, 0, 0, 0x4000, 0x2000, 1, chance.getrandbits(16)))
    kind, payload = chance.choice((TCP, TCP, TCP, UDP, chance.randrange(256))), chance.choice(PAYLOADS)
    return _random_header(SEGMENTS, chance) + packet(source, destination, payload, kind, fragment)


def random_packet_6(source: str, destination: str, chance: random.Random) -> bytes:
    """The same of IPv6, whose TCP header is not filled in: it goes to no kernel."""
    segments = SEGMENTS | {"gso": GSO_TCPV6, "start": 40, "header": 60}
    size, kind = 20 + chance.choice(PAYLOADS), chance.choice((TCP, TCP, TCP, UDP, chance.randrange(256)))
    ends = ipaddress.ip_address(source).packed + ipaddress.ip_address(destination).packed
    return (
        _random_header(segments, chance) + struct.pack(">IHBB", 6 << 28, size, kind, 64) + ends + bytes(size)
    )


def _random_header(segments: dict[str, int], chance: random.Random) -> bytes:
    partial = {"flags": NEEDS_CSUM} | {name: segments[name] for name in ("start", "offset")}
    fields = dict(chance.choice(({}, segments, partial)))
    edges = (0, 1, 2, 3, 7, 8, 10, 12, 16, 19, 20, 24, 40, 41, 0x7FFF, 0x8000, 0xFFF0, 0xFFFE, 0xFFFF)
    for name in chance.sample(
        ("flags", "gso", "header", "segment", "start", "offset"), chance.choice((0, 1, 1, 2))
    ):
        value = chance.choice(edges) if chance.random() < 0.7 else chance.getrandbits(16)
        fields[name] = value & 0xFF if name in ("flags", "gso") else value
    return vnet(**fields) if chance.random() < 0.95 else chance.randbytes(HEADER.size)
