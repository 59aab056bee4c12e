"""Pure: what the two ends tell each other by IDENTIFY and OPEN, and what they settle on.

Both commands move one 4 KiB data buffer with the same fields, little endian. ``size`` counts the bytes that
the sender knows; a shorter record of an older sender reads as zeros, what a newer one adds is ignored.
Whatever else changes, ``version`` and ``size`` stay where they are.

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
"""With less than the least the kernel takes an interface's IPv6 addresses away."""
DEFAULT_DEPTH = 32
CSUM, TSO4, TSO6 = 1, 2, 4
ALL_OFFLOADS = CSUM | TSO4 | TSO6
_RECORD = struct.Struct("<HHIQIHH64s")
_LAST_GENERATION = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class LinkParameters:
    """One end's offer, or what was settled. Raises ValueError for a value out of range."""

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
        """The record."""
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
    """The next one. After the last, which only a peer that made it up can have named, comes the first."""
    return generation % _LAST_GENERATION + 1


def parse(data: bytes, peer: str, version: int) -> LinkParameters:
    """The peer's record. Raises VersionMismatch unless it speaks ``version``, LinkViolation for nonsense."""
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


def settle(offer: LinkParameters, own: LinkParameters) -> LinkParameters:
    """As the device: what both ends can do. Raises LinkViolation for another vnet header."""
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


def check_settled(settled: LinkParameters, offer: LinkParameters) -> None:
    """As the host: refuse terms that go beyond what was offered. Raises LinkViolation."""
    beyond = (
        settled.mtu > offer.mtu
        or settled.depth > offer.depth
        or settled.generation < offer.generation
        or settled.offloads & ~offer.offloads
        or settled.vnet_header != offer.vnet_header
    )
    if beyond:
        raise LinkViolation("the device settled on parameters beyond the host's offer")
