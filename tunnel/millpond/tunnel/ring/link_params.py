# SPDX-License-Identifier: Apache-2.0
"""Pure: the parameters that both endpoints exchange by IDENTIFY and OPEN, and their negotiation.

Both commands move one 4 KiB data buffer with the same fields, little endian. ``size`` counts the bytes that
the sender knows; fields beyond the record of an older sender read as zeros, those that a newer one adds are
ignored. ``version`` and ``size`` keep their places in all versions.

| offset | size | field                                                        |
|--------|------|--------------------------------------------------------------|
| 0      | 2    | version of the tunnel                                        |
| 2      | 2    | size of this record                                          |
| 4      | 4    | offloads, TUN_F_* bits                                       |
| 8      | 8    | generation                                                   |
| 16     | 4    | MTU                                                          |
| 20     | 2    | entries per I/O queue                                        |
| 22     | 2    | bytes of vnet header before each packet                      |
| 24     | 64   | name, UTF-8, padded with zeros                               |
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from millpond.base.errors import VersionMismatch
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.layout import MAX_ENTRIES, MIN_ENTRIES

TUNNEL_VERSION = 1
VNET_HEADER = 12
MIN_MTU, DEFAULT_MTU, MAX_MTU = 1280, 65520, 65535
"""MTUs in bytes. Below MIN_MTU the kernel removes an interface's IPv6 addresses."""
DEFAULT_DEPTH = 32
CSUM, TSO4, TSO6 = 1, 2, 4
ALL_OFFLOADS = CSUM | TSO4 | TSO6
_RECORD = struct.Struct("<HHIQIHH64s")
_LAST_GENERATION = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class LinkParameters:
    """Parameters of a link, offered by one endpoint or negotiated by both. Raises ValueError for a value out
    of range.

    ``mtu`` and ``vnet_header`` are in bytes, ``depth`` in entries per I/O queue, ``offloads`` are TUN_F_*
    bits.
    """

    generation: int = 1
    mtu: int = DEFAULT_MTU
    depth: int = DEFAULT_DEPTH
    offloads: int = ALL_OFFLOADS
    vnet_header: int = VNET_HEADER
    name: str = ""
    version: int = TUNNEL_VERSION

    def __post_init__(self) -> None:
        if not MIN_MTU <= self.mtu <= MAX_MTU:
            raise ValueError(f"the MTU is {MIN_MTU} to {MAX_MTU} bytes, not {self.mtu}")
        if not MIN_ENTRIES <= self.depth <= MAX_ENTRIES:
            raise ValueError(f"the depth is {MIN_ENTRIES} to {MAX_ENTRIES} entries, not {self.depth}")
        if not 0 < self.generation <= _LAST_GENERATION:
            raise ValueError(f"generation {self.generation} is out of range")
        if self.offloads & (TSO4 | TSO6) and not self.offloads & CSUM:
            raise ValueError("segmentation offload needs checksum offload")
        if len(self.name.encode()) > 64 or (self.name and not self.name.isprintable()):
            raise ValueError("the name is not up to 64 bytes of printable UTF-8")

    def pack(self) -> bytes:
        """Pack the parameters as the record above."""
        name = self.name.encode()
        return _RECORD.pack(
            self.version,
            _RECORD.size,
            self.offloads,
            self.generation,
            self.mtu,
            self.depth,
            self.vnet_header,
            name,
        )


def generation_after(generation: int) -> int:
    """Return the next generation number. The first follows the last, which only a hostile peer can have
    named.
    """
    return generation % _LAST_GENERATION + 1


def parse(data: bytes, peer: str, version: int) -> LinkParameters:
    """Parse the peer's record. Raises VersionMismatch unless the peer speaks ``version``, LinkViolation for
    values out of range.
    """
    if len(data) < 4:
        raise LinkViolation(f"the {peer} end's parameters have {len(data)} bytes")
    theirs, size = struct.unpack_from("<HH", data)
    if theirs != version:
        raise VersionMismatch(f"the {peer} end of the tunnel", theirs, version)
    known = data[: min(size, _RECORD.size)].ljust(_RECORD.size, b"\0")
    _, _, offloads, generation, mtu, depth, vnet_header, name = _RECORD.unpack(known)
    try:
        text = name.rstrip(b"\0").decode()
        return LinkParameters(generation, mtu, depth, offloads, vnet_header, text, theirs)
    except ValueError as error:
        raise LinkViolation(f"the {peer} end's parameters: {error}") from None


def negotiate(offer: LinkParameters, own: LinkParameters) -> LinkParameters:
    """Compute, as the device, the parameters that both endpoints support. Raises LinkViolation for another
    vnet header.
    """
    if offer.vnet_header != own.vnet_header:
        raise LinkViolation(
            f"the host wants vnet headers of {offer.vnet_header} bytes, not {own.vnet_header}"
        )
    return replace(
        own,
        generation=max(offer.generation, own.generation),
        mtu=min(offer.mtu, own.mtu),
        depth=min(offer.depth, own.depth),
        offloads=offer.offloads & own.offloads,
    )


def check_negotiated(negotiated: LinkParameters, offer: LinkParameters) -> None:
    """Check, as the host, that no negotiated parameter exceeds the offer. Raises LinkViolation."""
    beyond = (
        negotiated.mtu > offer.mtu
        or negotiated.depth > offer.depth
        or negotiated.generation < offer.generation
        or negotiated.offloads & ~offer.offloads
        or negotiated.vnet_header != offer.vnet_header
    )
    if beyond:
        raise LinkViolation("the device chose parameters beyond the host's offer")
