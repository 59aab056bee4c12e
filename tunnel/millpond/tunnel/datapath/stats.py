"""Pure: what is counted of the packets of one direction."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class PacketStats:
    """One direction since the end was started. Bytes include headers.

    ``bells`` were rung for the peer, ``sleeps`` taken; ``backlog`` is the sum, over packets, of the ring
    entries in use when each was put in; ``full`` counts waits for a free entry. The rest are drops by cause.
    """

    packets: int = 0
    bytes: int = 0
    bells: int = 0
    sleeps: int = 0
    backlog: int = 0
    full: int = 0
    malformed: int = 0
    foreign_source: int = 0
    foreign_destination: int = 0
    refused: int = 0

    @property
    def dropped(self) -> int:
        """Packets that were not passed on, for any cause."""
        return self.malformed + self.foreign_source + self.foreign_destination + self.refused

    def since(self, earlier: PacketStats) -> PacketStats:
        """What was counted after ``earlier``; all of it where the end was started again in between."""
        if self.packets < earlier.packets or self.bytes < earlier.bytes:
            return self
        return PacketStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(PacketStats)))
