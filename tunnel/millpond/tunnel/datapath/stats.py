# SPDX-License-Identifier: Apache-2.0
"""Pure: the packet counters of one direction."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class PacketStats:
    """Counters of one direction since the endpoint was started. Bytes include headers.

    ``notifications`` were sent to the peer, ``sleeps`` those of the pump; ``backlog`` is the sum, over
    packets, of the ring entries in use when each was put in; ``full`` counts waits for a free entry. The
    others are drops by cause.
    """

    packets: int = 0
    bytes: int = 0
    notifications: int = 0
    sleeps: int = 0
    backlog: int = 0
    full: int = 0
    malformed: int = 0
    foreign_source: int = 0
    foreign_destination: int = 0
    refused: int = 0

    @property
    def dropped(self) -> int:
        """Packets that were dropped, for any cause."""
        return self.malformed + self.foreign_source + self.foreign_destination + self.refused

    def since(self, earlier: PacketStats) -> PacketStats:
        """Subtract the counters read ``earlier``; all of them where the endpoint was started again in
        between.
        """
        if self.packets < earlier.packets or self.bytes < earlier.bytes:
            return self
        return PacketStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(PacketStats)))
