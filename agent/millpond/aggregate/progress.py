# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): signs of progress, which tell a node that has much to do from one that is dead."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from millpond.aggregate.messages import Progress
from millpond.base.deadline import Deadline
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

STALL_SECONDS = 30.0
"""Time without a message, after which a neighbour is lost."""
_PROGRESS_SECONDS = 5.0
R = TypeVar("R", bound=Message)
T = TypeVar("T")


class ProgressTeller:
    """Sends Progress to ``parent`` while a node works on a request, at most every few seconds."""

    def __init__(self, parent: Channel) -> None:
        self._parent, self._told = parent, time.monotonic()

    def tick(self) -> None:
        """Send Progress if the last one is old. Raises RemoteError."""
        if time.monotonic() - self._told > _PROGRESS_SECONDS:
            self._parent.send(Progress(), Deadline.after(STALL_SECONDS))
            self._told = time.monotonic()

    def result(self, future: Future[T]) -> T:
        """Return the result of work in another thread. Raises what it raises."""
        while not wait([future], 1.0).done:
            self.tick()
        return future.result()


def expect(
    channel: Channel, reply: type[R], *, payload: int = 0, tick: Callable[[], None] | None = None
) -> R:
    """Return the next message, a ``reply``, behind any number of Progress, at each of which ``tick`` is
    called. Raises RemoteError.
    """
    while True:
        head = channel.receive(Deadline.after(STALL_SECONDS))
        if not isinstance(head.message, Progress) or head.payload_size:
            return channel.checked(head, reply, payload)
        if tick:
            tick()
