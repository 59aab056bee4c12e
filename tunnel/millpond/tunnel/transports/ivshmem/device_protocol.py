# SPDX-License-Identifier: Apache-2.0
"""Pure: define what an endpoint needs of ivshmem, inside or outside the virtual machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from millpond.tunnel.datapath.notifier import Notifier


class IvshmemDevice(Protocol):
    """Shared memory, and notifications in both directions. Held across links, by one endpoint of each role at
    a time.
    """

    position: int
    """This endpoint's ID at the doorbell server."""
    memory: memoryview
    """The whole shared memory."""
    weakly_ordered: bool
    """Whether this processor may reorder two loads, or two stores, of the memory."""
    wakes: tuple[int, ...]
    """Eventfds, one per queue pair, that the peer signals; only pumps wait on them."""
    events: tuple[int, ...]
    """Descriptors that are readable when ``refresh`` has something to do."""

    def notifiers(self, peer: int) -> tuple[Notifier, ...] | None:
        """Return the notifiers of the peer with this ID, one per queue pair; None if the peer
        is not there.
        """

    def refresh(self) -> None:
        """Process the arrivals and departures of peers."""

    @property
    def lost(self) -> bool:
        """Whether the device cannot be used for another link."""

    def close(self) -> None:
        """Release the memory and all descriptors."""
