# SPDX-License-Identifier: Apache-2.0
"""Edge: access BAR 0 of the ivshmem device: the machine's ID and the doorbell register."""

from __future__ import annotations

from millpond.tunnel.datapath.notifier import Notifier
from millpond.tunnel.ring.layout import QUEUES

_POSITION, _DOORBELL = 0x8, 0xC


class DoorbellRegisters:
    """The device's own ID, and the register whose stores interrupt other peers."""

    def __init__(self, bar: memoryview) -> None:
        self._words = bar.cast("I")

    @property
    def position(self) -> int:
        """This machine's ID at the doorbell server."""
        return int(self._words[_POSITION // 4])

    def notifiers(self, peer: int) -> tuple[Notifier, ...]:
        """Return the notifiers of a peer, one per queue pair: a store of the peer's ID and the vector wakes
        it.
        """
        register = self._words[_DOORBELL // 4 : _DOORBELL // 4 + 1]
        return tuple(Notifier(register=register, value=peer << 16 | queue) for queue in range(QUEUES))
