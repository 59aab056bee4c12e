# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): ends the requests that wait for a server that is not there any more.

A request may take as long as its deadline while the server answers anything: other requests, or
keep-alives, which are sent once a request has waited for a while. A server that says nothing at all for
``silence`` seconds has stopped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from millpond.base.deadline import Deadline
from millpond.base.errors import DeadlineExceeded, MillpondError
from millpond.fs.proto.file_ops import Ping, SessionHello
from millpond.wire.channel import Channel

SILENT_SECONDS = 15.0
_TICKS, _LONGEST_TICK = 8, 0.5
_EARLY = 0.25  # of the silence: then the first keep-alive is sent


class WaitingRequest(Protocol):
    """A request that waits for its reply."""

    def give_up(self) -> None:
        """End the wait: the server has stopped. Any thread may call."""


class KeepAlive:
    """Watches the requests of the client with this name to the server that ``dial`` reaches. ``heard`` is
    when the server last answered anything, in seconds of the monotonic clock, ``away_since`` since
    when it cannot be connected to, None if it can.
    """

    def __init__(self, dial: Callable[[Deadline], Channel], client: bytes, silence: float) -> None:
        self._dial, self._silence = dial, silence
        self._hello = SessionHello(client, os.urandom(16), may_block=False)
        self._tick = min(silence / _TICKS, _LONGEST_TICK)
        self._waiting: dict[WaitingRequest, float] = {}
        self.heard = 0.0
        self.away_since: float | None = None
        self._channel: Channel | None = None
        self._is_asked = self._awake = False
        self._called, self._closed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, waiting: WaitingRequest, began: float) -> None:
        """Watch a request of an operation that began then."""
        self._waiting[waiting] = began
        if not self._awake:
            self._wake()

    def end(self, waiting: WaitingRequest) -> None:
        """Watch a request no longer."""
        self._waiting.pop(waiting, None)

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
            self._awake = True
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
            thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._tick):
            if self._waiting:
                self._look()
                continue
            with self._lock:
                self._awake = bool(self._waiting)
                if self._awake or self._closed.is_set():
                    continue
                self._called.clear()
            self._called.wait()
        self._disconnect()

    def _look(self) -> None:
        """Send a keep-alive if a request has waited for a while, and give up those that wait in vain."""
        silent = time.monotonic() - max(self.heard, min([*self._waiting.values()], default=0.0))
        if silent > _EARLY * self._silence:
            self._ask()
        now = time.monotonic()
        for waiting, began in list(self._waiting.items()):
            if now - max(began, self.heard) > self._silence:
                waiting.give_up()

    def _ask(self) -> None:
        """Send a keep-alive, unless one is under way, and wait a little for its answer."""
        deadline = Deadline.after(self._tick)
        try:
            if self._channel is None:
                self._channel = self._dial(Deadline.after(_EARLY * self._silence))
                self._channel.send(self._hello, Deadline.after(_EARLY * self._silence))
            elif not self._is_asked:
                self._channel.send(Ping(), deadline)
            self._is_asked = True
            self._channel.receive(deadline)
            self._channel.receive_payload(0, deadline)
        except DeadlineExceeded:  # the answer may yet come
            return
        except (MillpondError, OSError):
            self._disconnect()
            return
        self._is_asked, self.heard = False, time.monotonic()

    def _disconnect(self) -> None:
        if self._channel:
            self._channel.close()
        self._channel, self._is_asked = None, False
