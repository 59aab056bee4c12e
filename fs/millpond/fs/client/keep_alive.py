# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): ends the requests that wait for a server that is not there any more.

A request may take as long as its deadline while the server answers anything: other requests, or
keep-alives, which are sent once a request has waited for a while. A server that says nothing at all for
``silence`` seconds has stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from millpond.base.deadline import Deadline

SILENT_SECONDS = 15.0
_TICKS, _LONGEST_TICK = 8, 0.5
_EARLY = 0.25  # of the silence: then the first keep-alive is sent
_JOIN_SECONDS = 5.0


class Watched(Protocol):
    """A connection: ``since`` is when the operation began that waits for a reply over it, 0 if none does."""

    since: float

    def give_up(self, since: float) -> None:
        """End the wait of the operation that began then, if it still waits. Any thread may call."""


class KeepAlive:
    """Watches ``connections`` to a server. ``ping`` returns once the server has answered a keep-alive, or
    cannot be reached, or the deadline has passed. ``heard`` is when the server last answered anything, in
    seconds of the monotonic clock, ``away_since`` since when it cannot be connected to, None if it can.
    """

    def __init__(
        self, ping: Callable[[Deadline], None], silence: float, connections: Sequence[Watched]
    ) -> None:
        self._ping, self._silence, self._connections = ping, silence, connections
        self._tick = min(silence / _TICKS, _LONGEST_TICK)
        self.heard = 0.0
        self.away_since: float | None = None
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start watching, unless that has been done."""
        with self._lock:
            if self._thread is None and not self.closed.is_set():
                self._thread = threading.Thread(target=self._run, name="keep-alive", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            self.closed.set()
            thread = self._thread
        if thread:
            thread.join(_JOIN_SECONDS)

    def earlier(self, deadline: Deadline) -> Deadline:
        """Return the deadline of connecting for an operation with this one."""
        return deadline.earlier(self._silence)

    def is_away(self) -> bool:
        """Note that the server could not be connected to. Returns whether that has been so, and nothing was
        heard, for as long as a server may be silent.
        """
        now = time.monotonic()
        if self.away_since is None or self.heard > self.away_since:
            self.away_since = now
        return now > self.away_since + self._silence

    def _waiting(self) -> list[tuple[Watched, float]]:
        return [(each, since) for each in list(self._connections) if (since := each.since)]

    def _run(self) -> None:
        """Send a keep-alive if a request has waited for a while, and give up those that wait in vain."""
        while not self.closed.wait(self._tick):
            now = time.monotonic()
            since = max(self.heard, min((since for _, since in self._waiting()), default=now))
            if now - since > _EARLY * self._silence:
                self._ping(Deadline(max(since + self._silence, now + self._tick)))
                now = time.monotonic()
            for connection, began in self._waiting():
                if now - max(began, self.heard) >= self._silence:
                    connection.give_up(began)
