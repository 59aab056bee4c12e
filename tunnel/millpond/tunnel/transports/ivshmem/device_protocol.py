"""Pure: what an end needs of ivshmem, whichever side of QEMU it is on."""

from __future__ import annotations

from typing import Protocol

from millpond.tunnel.datapath.notifier import Notifier


class IvshmemDevice(Protocol):
    """Shared memory, bells to hear and to ring. Held across links; one end of each role at a time."""

    position: int
    """This end's ID at the doorbell server."""
    memory: memoryview
    """All of the shared memory."""
    weakly_ordered: bool
    """Whether this processor may reorder two loads, or two stores, of it."""
    wakes: tuple[int, ...]
    """Eventfds, one per queue pair, that the peer rings; only pumps wait on them."""
    news: tuple[int, ...]
    """Descriptors that are readable when ``refresh`` has something to do."""

    def bells(self, peer: int) -> tuple[Notifier, ...] | None:
        """What rings at the peer with this ID, one per queue pair; None if it is not there."""

    def refresh(self) -> None:
        """Take note of who has come and who has left."""

    @property
    def lost(self) -> bool:
        """Whether it cannot be used for another link."""

    def close(self) -> None:
        """Give all of it back."""
