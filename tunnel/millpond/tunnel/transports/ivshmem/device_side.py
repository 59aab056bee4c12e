"""Pure: the device's side of a session: make the region anew for the host that asks, offer it."""

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
    """One link of the device's end, with a region of ``layout``, which the board has room for."""

    def __init__(self, board: IvshmemDevice, layout: Layout) -> None:
        super().__init__("device", board)
        self._layout = layout
        self._session = DeviceSession(self.box, board.position, draw)

    @property
    def session(self) -> DeviceSession:
        """This link's."""
        return self._session

    def meet(self, wait: Wait) -> tuple[Region, int]:
        """Answer every question until a host accepts."""
        while True:
            question = self.await_peer(self._question, wait)
            region = make_region(self.board.memory, self._layout, weakly_ordered=self.board.weakly_ordered)
            self._session.answer(question)
            self.await_peer(functools.partial(self._reaction, question), wait)
            if self._session.intact:
                return region, question.peer

    def _question(self) -> Word | None:
        question = self._session.question()
        return question if question and self.board.bells(question.peer) else None

    def _reaction(self, question: Word) -> Word | None:
        self._session.repeat()
        heard = self.box.heard
        return None if heard == question else heard


def make_region(memory: memoryview, layout: Layout, *, weakly_ordered: bool = WEAKLY_ORDERED) -> Region:
    """The region at the start of ``memory``, its registers and rings empty but for those of the session."""
    memory[:HOST_WORD] = bytes(HOST_WORD)
    for queue in range(QUEUES):
        for ring in (layout.submission_ring(queue), layout.completion_ring(queue)):
            memory[ring.start : ring.end] = bytes(ring.end - ring.start)
    return Region.create(memory[: layout.size], layout, weakly_ordered=weakly_ordered)
