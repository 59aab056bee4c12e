# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): ends the requests that wait for a server that is not there any more.

A request may take as long as its deadline while the server answers anything: other requests, or
keep-alives, which are sent once a request has waited for a while. A server that says nothing at all for
``silence`` seconds has stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from millpond.base.deadline import Deadline

SILENT_SECONDS = 15.0
_TICKS, _LONGEST_TICK = 8, 0.5
_EARLY = 0.25  # of the silence: then the first keep-alive is sent
_JOIN_SECONDS = 5.0


class KeepAlive:
    """Watches the requests to a server. ``ping`` returns once the server has answered a keep-alive, or cannot
    be reached, or the deadline has passed. ``heard`` is when the server last answered anything, in seconds of
    the monotonic clock, ``away_since`` since when it cannot be connected to, None if it can.
    """

    def __init__(self, ping: Callable[[Deadline], None], silence: float) -> None:
        self._ping, self._silence = ping, silence
        self._tick = min(silence / _TICKS, _LONGEST_TICK)
        self._waiting: dict[Callable[[], None], float] = {}
        self.heard = 0.0
        self.away_since: float | None = None
        self._called, self._closed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, give_up: Callable[[], None], began: float) -> None:
        """Watch a request of an operation that began then; ``give_up`` ends its wait, from any thread."""
        self._waiting[give_up] = began
        if not self._called.is_set():
            self._wake()

    def end(self, give_up: Callable[[], None]) -> None:
        """Watch a request no longer."""
        self._waiting.pop(give_up, None)

    def earlier(self, deadline: Deadline) -> Deadline:
        """Return the deadline of connecting for an operation with this one."""
        return deadline.earlier(self._silence)

    def is_away(self) -> bool:
        """Note that the server could not be connected to. Returns whether that has been so for as long as a
        server may be silent.
        """
        now = time.monotonic()
        if self.away_since is None:
            self.away_since = now
        return now > self.away_since + self._silence

    def _wake(self) -> None:
        with self._lock:
            self._called.set()
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="keep-alive", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            self._closed.set()
            self._called.set()
            thread = self._thread
        if thread:
            thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._closed.wait(self._tick):
            if self._waiting:
                self._look()
                continue
            self._called.clear()
            if not (self._waiting or self._closed.is_set()):
                self._called.wait()

    def _look(self) -> None:
        """Send a keep-alive if a request has waited for a while, and give up those that wait in vain."""
        now = time.monotonic()
        since = max(self.heard, min([*self._waiting.values()], default=now))
        if now - since > _EARLY * self._silence:
            self._ping(Deadline(max(since + self._silence, now + self._tick)))
            now = time.monotonic()
        for give_up, began in list(self._waiting.items()):
            if now - max(began, self.heard) >= self._silence:
                give_up()
