"""Edge: a link through rings in shared memory, whatever brought the two ends to the same memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Self

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, DeadlineExceeded
from millpond.tunnel.datapath import native
from millpond.tunnel.datapath.context import DatapathContext, Loop, QueueContext
from millpond.tunnel.datapath.notifier import Notifier
from millpond.tunnel.datapath.stats_shm import SharedStats
from millpond.tunnel.ring import handshake
from millpond.tunnel.ring.layout import RECV, SEND
from millpond.tunnel.ring.link_params import LinkParameters
from millpond.tunnel.ring.region import Region
from millpond.tunnel.transports.base import Wait

OPENING_SECONDS = 2.0
_LOOK_SECONDS = 0.001


class RingConnection:
    """One peer over ``region``. Per queue pair, ``wakes`` are the eventfds that it rings, ``bells`` what
    rings at it; those of the admin queue are not used. ``gone`` becomes readable when it dies.
    """

    check_seconds: float | None = None
    calls: frozenset[str] = frozenset()
    privileged = False

    def __init__(
        self,
        role: str,
        region: Region,
        wakes: tuple[int, ...],
        bells: tuple[Notifier, ...],
        gone: int,
        release: Callable[[], None],
    ) -> None:
        self.role, self.region, self.wakes, self.bells, self.gone = role, region, wakes, bells, gone
        self._release = release

    def open(self, own: LinkParameters, wait: Wait) -> tuple[LinkParameters, str]:
        """Enable, IDENTIFY and OPEN, within 2 s."""
        opener = handshake.open_as_host if self.role == "host" else handshake.open_as_device
        return opener(self.region, own, self._patience(wait))

    def check(self) -> None:
        """The descriptor ``gone`` tells all."""

    def loops(self, gear: DatapathContext) -> tuple[Loop, Loop]:
        """A loop of the wished engine for each queue pair."""
        outward, inward = (SEND, RECV) if self.role == "host" else (RECV, SEND)
        send, receive = native.loops(gear.engine, self.role)
        return (
            functools.partial(send, self._station(outward, gear, gear.outward)),
            functools.partial(receive, self._station(inward, gear, gear.inward)),
        )

    def _station(self, queue: int, gear: DatapathContext, counters: SharedStats) -> QueueContext:
        memory = self.region.queue(queue, gear.terms.depth)
        return QueueContext(self.role == "host", memory, self.wakes[queue], self.bells[queue], gear, counters)

    def _patience(self, wait: Wait) -> handshake.Wait:
        """Looks for the peer's next step every millisecond; the admin queue has no bells.

        An eventfd is one open file for all who hold it: the peer can have its readers and writers wait, and
        fill or empty it, at any moment. So this process, which must never wait for the peer, touches none;
        the pumps do, which are killed.
        """
        deadline = Deadline.after(OPENING_SECONDS)

        def wait_for(ready: Callable[[], bool]) -> None:
            while not ready():
                if deadline.passed:
                    raise DeadlineExceeded("the peer did not open the link in time")
                if wait((self.gone,), _LOOK_SECONDS) and not ready():
                    raise ConnectionLost("the peer went away while the link was opened")

        return wait_for

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()
