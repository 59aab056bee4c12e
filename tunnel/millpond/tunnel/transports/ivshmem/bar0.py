"""Pure: BAR 0 of the ivshmem device."""

from __future__ import annotations

from millpond.tunnel.datapath.notifier import Notifier
from millpond.tunnel.ring.layout import QUEUES

_POSITION, _DOORBELL = 0x8, 0xC


class DoorbellRegisters:
    """The device's own ID, and the register that rings at others."""

    def __init__(self, bar: memoryview) -> None:
        self._words = bar.cast("I")

    @property
    def position(self) -> int:
        """This machine's ID at the doorbell server."""
        return int(self._words[_POSITION // 4])

    def bells(self, peer: int) -> tuple[Notifier, ...]:
        """What rings at a peer: a store of its ID and the vector."""
        register = self._words[_DOORBELL // 4 : _DOORBELL // 4 + 1]
        return tuple(Notifier(register=register, value=peer << 16 | queue) for queue in range(QUEUES))
