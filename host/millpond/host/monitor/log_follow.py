# SPDX-License-Identifier: Apache-2.0
"""Edge: follows a device's or a job's log by position, so that no line comes twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from millpond.host.client.daemon_client import DaemonClient

POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A line of the log, or an event of its device (gone, back, lines lost)."""

    text: str
    is_event: bool = False


def follow(client: DaemonClient, target: str, lines: int) -> Iterator[LogEntry]:
    """Yield the last ``lines`` lines, then new ones until a job has ended; of a device without end.

    A device may go and come back meanwhile. Raises the errors of DaemonClient.
    """
    position, gone = None, False
    while True:
        new = client.new_log(target, lines, position)
        if new.gone and not gone:
            reason = new.gone.removeprefix(f"{target}: ")
            yield LogEntry(f"{target} is gone: {reason}", is_event=True)
        gone = gone or bool(new.gone)
        if new.position is not None:
            other = position is not None and position.boot != new.position.boot
            if other and not gone:
                yield LogEntry(f"{target} is gone", is_event=True)
            if other or gone:
                again = ": its agent was started again" if other else ""
                yield LogEntry(f"{target} is back{again}", is_event=True)
            if new.lost:
                yield LogEntry(f"{new.lost} lines came too fast and are lost", is_event=True)
            yield from map(LogEntry, new.lines)
            position, gone = new.position, False
        if new.ended:
            return
        time.sleep(POLL_SECONDS)
