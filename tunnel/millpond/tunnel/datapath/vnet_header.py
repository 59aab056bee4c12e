# SPDX-License-Identifier: Apache-2.0
"""Pure: decide by its vnet header whether the kernel may be given a peer's packet: only headers that Linux
itself makes with the offloads that were negotiated.

The header (``struct virtio_net_hdr_v1`` of linux/virtio_net.h, virtio 1.2 section 5.1.6) tells the kernel to
complete a checksum and to cut a packet into segments, both where the peer says. ``datapath.c`` has the same
rules.

| flags, gso_type    | the others                                                                      |
|--------------------|---------------------------------------------------------------------------------|
| 0 or DATA_VALID, 0 | 0                                                                               |
| NEEDS_CSUM, 0      | needs TUN_F_CSUM; the checksum lies behind the IP header and inside the packet; |
|                    | hdr_len within the packet, gso_size 0                                           |
| NEEDS_CSUM, TCPV4  | needs TUN_F_TSO4, or TUN_F_TSO6 with TCPV6; an unfragmented packet of that IP   |
| or TCPV6           | version with TCP next to the IP header; csum_start and csum_offset are TCP's;   |
|                    | hdr_len covers the TCP header; gso_size is a possible segment                   |

num_buffers is 0 or 1. A checksum inside the IP header would rewrite addresses after they were checked.
"""

from __future__ import annotations

import struct

from millpond.tunnel.ring.link_params import CSUM, TSO4, TSO6

NEEDS_CSUM, DATA_VALID = 1, 2
GSO_TCPV4, GSO_TCPV6 = 1, 4
LEAST_SEGMENT = 8
"""Bytes of the smallest segment that Linux's TCP makes (TCP_MIN_GSO_SIZE)."""
MOST_SEGMENT = 0xFFFF
"""The most bytes of a segment with its headers; 0xFFFF alone is the kernel's GSO_BY_FRAGS."""
TCP_HEADER, TCP_CHECKSUM = 20, 16

_FIELDS = struct.Struct("<BBHHHH")
_FRAGMENT = 0x3FFF
_TCP = 6


def is_allowed(head: bytes, vnet_header: int, size: int, offloads: int) -> bool:
    """Return whether a packet may go to the kernel. ``head`` is its first bytes, vnet header and fixed IP
    header at least, ``size`` its bytes with the vnet header; ``offloads`` are TUN_F_* bits.
    """
    if vnet_header < _FIELDS.size:
        return True
    flags, gso, header, segment, start, offset = _FIELDS.unpack_from(head)
    if vnet_header > _FIELDS.size and (head[_FIELDS.size] > 1 or head[_FIELDS.size + 1]):
        return False
    if flags != NEEDS_CSUM:
        return flags in (0, DATA_VALID) and not (gso or header or segment or start or offset)
    packet, ip_header = size - vnet_header, _ip_header(head, vnet_header)
    inside = ip_header <= start and start + offset + 2 <= packet and header <= packet
    if not (offloads & CSUM and ip_header and inside):
        return False
    if not gso:
        return not segment
    tcp = start == ip_header and offset == TCP_CHECKSUM and start + TCP_HEADER <= header
    possible = segment >= LEAST_SEGMENT and start + TCP_HEADER + segment <= MOST_SEGMENT
    return tcp and possible and _can_segment(head[vnet_header:], gso, offloads)


def _ip_header(head: bytes, at: int) -> int:
    """Return the bytes of the IP header, 0 for an impossible one; IPv6's extensions are not counted."""
    if head[at] >> 4 == 6:
        return 40
    length = (head[at] & 15) * 4
    return length if length >= 20 else 0


def _can_segment(packet: bytes, gso: int, offloads: int) -> bool:
    """Return whether the IP header is of TCP that may be segmented so."""
    if packet[0] >> 4 == 4:
        whole = not int.from_bytes(packet[6:8]) & _FRAGMENT
        return gso == GSO_TCPV4 and bool(offloads & TSO4) and whole and packet[9] == _TCP
    return gso == GSO_TCPV6 and bool(offloads & TSO6) and packet[6] == _TCP
