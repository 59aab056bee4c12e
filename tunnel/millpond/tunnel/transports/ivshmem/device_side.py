# SPDX-License-Identifier: Apache-2.0
"""Edge: pair as the device: prepare the region anew for the host that asks, and offer it."""

from __future__ import annotations

import functools

from millpond.tunnel.ring.barrier import WEAKLY_ORDERED
from millpond.tunnel.ring.layout import QUEUES, Layout
from millpond.tunnel.ring.region import Region
from millpond.tunnel.transports.base import Wait
from millpond.tunnel.transports.ivshmem.connection import IvshmemConnection, draw
from millpond.tunnel.transports.ivshmem.device_protocol import IvshmemDevice
from millpond.tunnel.transports.ivshmem.pairing import HOST_WORD, DeviceSession, Word


class DeviceConnection(IvshmemConnection):
    """A link of the device's endpoint, with a region of ``layout``, for which the shared memory has room."""

    def __init__(self, device: IvshmemDevice, layout: Layout) -> None:
        super().__init__("device", device)
        self._layout = layout
        self._session = DeviceSession(self.mailbox, device.position, draw)

    @property
    def session(self) -> DeviceSession:
        """The session of this link."""
        return self._session

    def pair(self, wait: Wait) -> tuple[Region, int]:
        """Answer questions until a host accepts."""
        while True:
            question = self.await_peer(self._question, wait)
            region = make_region(self.device.memory, self._layout, weakly_ordered=self.device.weakly_ordered)
            self._session.answer(question)
            self.await_peer(functools.partial(self._reaction, question), wait)
            if self._session.intact:
                return region, question.peer

    def _question(self) -> Word | None:
        question = self._session.question()
        return question if question and self.device.notifiers(question.peer) else None

    def _reaction(self, question: Word) -> Word | None:
        self._session.repeat()
        word = self.mailbox.peer_word
        return None if word == question else word


def make_region(memory: memoryview, layout: Layout, *, weakly_ordered: bool = WEAKLY_ORDERED) -> Region:
    """Prepare the region at the start of ``memory``: clear its registers, except those of the session, and
    its rings.
    """
    memory[:HOST_WORD] = bytes(HOST_WORD)
    for queue in range(QUEUES):
        for ring in (layout.submission_ring(queue), layout.completion_ring(queue)):
            memory[ring.start : ring.end] = bytes(ring.end - ring.start)
    return Region.create(memory[: layout.size], layout, weakly_ordered=weakly_ordered)
