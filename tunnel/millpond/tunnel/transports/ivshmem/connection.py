"""Edge (the clock): a link over an ivshmem board: first a session, then rings as everywhere, and a beat."""

from __future__ import annotations

import abc
import os
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from millpond.base.errors import ConnectionLost
from millpond.tunnel.datapath.context import DatapathContext, Loop
from millpond.tunnel.ring.link_params import LinkParameters
from millpond.tunnel.ring.region import Region
from millpond.tunnel.transports.base import Wait
from millpond.tunnel.transports.ivshmem.device_protocol import IvshmemDevice
from millpond.tunnel.transports.ivshmem.pairing import (
    NUMBERS,
    DeviceSession,
    HostSession,
    Mailbox,
    Pulse,
    Word,
)
from millpond.tunnel.transports.ring_connection import RingConnection

T = TypeVar("T")

BEAT_SECONDS = 0.1
LOST_SECONDS = 1.0
"""A peer whose beat stands still for so long is taken for dead."""
_LOOK_SHARE, _FIRST_LOOK_SECONDS = 1 / 16, 0.001


def draw() -> int:
    """A number for a session."""
    return 1 + secrets.randbelow(NUMBERS - 1)


class IvshmemConnection(abc.ABC):
    """One link of an end of ``role``. Whoever comes to be the peer is found while it is opened."""

    check_seconds: float | None = BEAT_SECONDS
    calls: frozenset[str] = RingConnection.calls
    privileged = RingConnection.privileged

    def __init__(self, role: str, board: IvshmemDevice) -> None:
        self._role, self.board = role, board
        self.box = Mailbox(board.memory, role)
        self._peer, self._pulse = 0, Pulse(0, 0)
        self.gone = os.eventfd(0, os.EFD_CLOEXEC)  # never readable: ``check`` tells

    @property
    @abc.abstractmethod
    def session(self) -> HostSession | DeviceSession:
        """This link's; its word is this end's."""

    @abc.abstractmethod
    def meet(self, wait: Wait) -> tuple[Region, int]:
        """Wait until a peer is there, for ever: the region to share, the peer's ID."""

    def open(self, own: LinkParameters, wait: Wait) -> tuple[LinkParameters, str]:
        """Wait for the peer's end, for ever; then open the link with it, within 2 s."""
        region, self._peer = self.meet(wait)
        bells = self.board.bells(self._peer)
        if bells is None:
            raise ConnectionLost("the peer left the doorbell server")
        self._ring = RingConnection(self._role, region, self.board.wakes, bells, self.gone, _nothing)

        def watchful(descriptors: Sequence[int], seconds: float | None) -> set[int]:
            ready = wait(descriptors, seconds)
            self._verify()
            return ready

        terms, name = self._ring.open(own, watchful)
        self._pulse = Pulse(self.box.their_beat, time.monotonic())
        return terms, name

    def await_peer(self, found: Callable[[], T | None], wait: Wait) -> T:
        """What ``found`` finds, looking ever less often: each ms at first and after news, later 10 times a
        second. There are no bells here, for the reason that ``RingConnection`` has.

        Raises ConnectionLost after a second on a board that is lost: there may be a better one.
        """
        began = time.monotonic()
        while (what := found()) is None:
            waited = time.monotonic() - began
            if self.board.lost and waited > LOST_SECONDS:
                raise ConnectionLost("the doorbell server is gone, and no peer answers")
            if wait(self.board.news, min(max(_LOOK_SHARE * waited, _FIRST_LOOK_SECONDS), BEAT_SECONDS)):
                began = time.monotonic()
            self.board.refresh()
        return what

    def check(self) -> None:
        """Show that this end lives, and see whether the peer does."""
        self.box.beat()
        self._verify()
        if self._pulse.still(self.box.their_beat, time.monotonic()) > LOST_SECONDS:
            raise ConnectionLost(f"no sign of life from the peer for {LOST_SECONDS:g} s")

    def _verify(self) -> None:
        self.board.refresh()
        if not self.board.lost and self.board.bells(self._peer) is None:
            raise ConnectionLost("the peer left the doorbell server")
        if not self.session.intact:
            raise ConnectionLost("the peer ended the link, or began anew")

    def loops(self, gear: DatapathContext) -> tuple[Loop, Loop]:
        """A loop of the wished engine for each queue pair."""
        return self._ring.loops(gear)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the peer; the board stays."""
        self.box.say(Word())
        os.close(self.gone)


def _nothing() -> None:
    """The board is released by the transport."""
