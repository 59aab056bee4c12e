# SPDX-License-Identifier: Apache-2.0
"""Edge: run a link through rings in shared memory, for every transport that shares memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Self

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, DeadlineExceeded
from millpond.tunnel.datapath import native
from millpond.tunnel.datapath.context import DatapathContext, Loop, PumpNeeds, QueueContext
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
    """A connection with one peer over ``region``.

    Per queue pair, ``wakes`` are the eventfds that the peer signals, ``notifiers`` wake the peer; those of
    the admin queue are not used. ``gone`` becomes readable when the peer dies; ``release`` is called at the
    end.
    """

    check_seconds: float | None = None

    def __init__(
        self,
        role: str,
        region: Region,
        wakes: tuple[int, ...],
        notifiers: tuple[Notifier, ...],
        gone: int,
        release: Callable[[], None],
    ) -> None:
        self.role, self.region, self.wakes, self.notifiers, self.gone = role, region, wakes, notifiers, gone
        self._release = release

    def open(self, own: LinkParameters, wait: Wait) -> tuple[LinkParameters, str]:
        """Enable the controller, IDENTIFY and OPEN, within 2 s."""
        opener = handshake.open_as_host if self.role == "host" else handshake.open_as_device
        return opener(self.region, own, self._waiter(wait))

    @property
    def needs(self) -> PumpNeeds:
        """The eventfds of both directions, and the socket whose end tells the peer of a death."""
        notifiers = (notifier.descriptor for notifier in self.notifiers if notifier.descriptor >= 0)
        return PumpNeeds(frozenset((self.gone, *self.wakes, *notifiers)))

    def check(self) -> None:
        """Do nothing: the descriptor ``gone`` reports the death of the peer."""

    def loops(self, datapath: DatapathContext) -> tuple[Loop, Loop]:
        """Return the loops of the configured engine, one per queue pair."""
        outward, inward = (SEND, RECV) if self.role == "host" else (RECV, SEND)
        send, receive = native.loops(datapath.engine, self.role)
        return (
            functools.partial(send, self._context(outward, datapath, datapath.outward)),
            functools.partial(receive, self._context(inward, datapath, datapath.inward)),
        )

    def _context(self, queue: int, datapath: DatapathContext, stats: SharedStats) -> QueueContext:
        memory = self.region.queue(queue, datapath.params.depth)
        wake, notifier = self.wakes[queue], self.notifiers[queue]
        return QueueContext(self.role == "host", memory, wake, notifier, datapath, stats)

    def _waiter(self, wait: Wait) -> handshake.Wait:
        """Return a function that polls for the peer's next step every millisecond: the admin queue has no
        notifications.

        An eventfd is one open file for all its holders: at any moment the peer can fill or empty it and make
        readers and writers block. This process must never wait for the peer, so it touches none; pumps do,
        which it can kill.
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
