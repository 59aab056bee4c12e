# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): accept connections, handle each in a thread of its own, and survive every failure."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.2
Handler = Callable[[socket.socket], None]


class Acceptor:
    """Passes each connection of the listening socket ``server`` to ``handle``, which then owns it.

    At most ``places`` at a time; more are refused. A lack of descriptors or threads is waited out.
    """

    def __init__(self, server: socket.socket, handle: Handler, *, places: int, name: str) -> None:
        self._server, self._handle = server, handle
        self._places = threading.BoundedSemaphore(places)
        self._name = name
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether connections are still being accepted."""
        return self._thread.is_alive() and not self._closed.is_set()

    def close(self) -> None:
        """Accept no more connections."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError as error:
                if not self._closed.is_set():
                    log.warning("%s: cannot accept: %s", self._name, error)
                    self._closed.wait(PAUSE_SECONDS)
                continue
            self._start(connection)

    def _start(self, connection: socket.socket) -> None:
        if not self._places.acquire(blocking=False):
            log.warning("%s: too many connections: one refused", self._name)
            connection.close()
            return
        try:
            threading.Thread(target=self._run, args=(connection,), name=self._name, daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._places.release()
            connection.close()
            log.warning("%s: %s", self._name, error)

    def _run(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._handle(connection)
        finally:
            self._places.release()
