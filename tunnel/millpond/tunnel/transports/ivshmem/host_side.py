# SPDX-License-Identifier: Apache-2.0
"""Edge: pair as the host: ask, attach to the region that the device prepared, accept."""

from __future__ import annotations

from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.layout import MIN_ENTRIES, PAGE, SIZE_REGISTER, Layout
from millpond.tunnel.ring.region import Region
from millpond.tunnel.transports.base import Wait
from millpond.tunnel.transports.ivshmem.connection import IvshmemConnection, draw
from millpond.tunnel.transports.ivshmem.device_protocol import IvshmemDevice
from millpond.tunnel.transports.ivshmem.pairing import HostSession, Word


class HostConnection(IvshmemConnection):
    """A link of the host's endpoint."""

    def __init__(self, device: IvshmemDevice) -> None:
        super().__init__("host", device)
        self._session = HostSession(self.mailbox, device.position, draw)

    @property
    def session(self) -> HostSession:
        """The session of this link."""
        return self._session

    def pair(self, wait: Wait) -> tuple[Region, int]:
        """Ask until a device answers. Raises LinkViolation if the device prepared no valid region."""
        self._session.ask()
        answer = self.await_peer(self._answer, wait)
        region = Region.attach(_described(self.device.memory))
        self._session.accept(answer)
        return region, answer.peer

    def _answer(self) -> Word | None:
        """Return the device's answer, once the server has announced that peer too."""
        self._session.ask()
        answer = self._session.answer()
        return answer if answer and self.device.notifiers(answer.peer) else None


def _described(memory: memoryview) -> memoryview:
    """Return the part of the memory that the device declares as its region. Raises LinkViolation."""
    size = memory[:PAGE].cast("Q")[SIZE_REGISTER // 8]
    if not Layout(MIN_ENTRIES).size <= size <= len(memory):
        raise LinkViolation(f"the device declares a region of {size} bytes in {len(memory)} of memory")
    return memory[:size]
