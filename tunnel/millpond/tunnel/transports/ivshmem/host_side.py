"""Pure: the host's side of a session: ask, find the region that the device made, accept."""

from __future__ import annotations

from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.layout import MIN_ENTRIES, PAGE, SIZE_REGISTER, Layout
from millpond.tunnel.ring.region import Region
from millpond.tunnel.transports.base import Wait
from millpond.tunnel.transports.ivshmem.connection import IvshmemConnection, draw
from millpond.tunnel.transports.ivshmem.device_protocol import IvshmemDevice
from millpond.tunnel.transports.ivshmem.pairing import HostSession, Word


class HostConnection(IvshmemConnection):
    """One link of the host's end."""

    def __init__(self, board: IvshmemDevice) -> None:
        super().__init__("host", board)
        self._session = HostSession(self.box, board.position, draw)

    @property
    def session(self) -> HostSession:
        """This link's."""
        return self._session

    def meet(self, wait: Wait) -> tuple[Region, int]:
        """Ask until a device answers. Raises LinkViolation if what it made is no region."""
        self._session.ask()
        answer = self.await_peer(self._answer, wait)
        region = Region.attach(_described(self.board.memory))
        self._session.accept(answer)
        return region, answer.peer

    def _answer(self) -> Word | None:
        """The answer, once the server has told of the peer that gives it too."""
        self._session.ask()
        answer = self._session.answer()
        return answer if answer and self.board.bells(answer.peer) else None


def _described(memory: memoryview) -> memoryview:
    """As much of the memory as the device says that its region takes."""
    size = memory[:PAGE].cast("Q")[SIZE_REGISTER // 8]
    if not Layout(MIN_ENTRIES).size <= size <= len(memory):
        raise LinkViolation(f"the device tells of a region of {size} bytes in {len(memory)} of memory")
    return memory[:size]
