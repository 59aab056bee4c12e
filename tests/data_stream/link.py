# SPDX-License-Identifier: Apache-2.0
"""A link between consumers and a service, in this process: it can fall silent, and be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from millpond.wire.acceptor import Acceptor


class Relay:
    """Relays connections to a service. ``silence`` keeps those that there are open but brings nothing more;
    ``cut`` resets them and all that come until ``mend``.
    """

    def __init__(self, service: str) -> None:
        host, _, port = service.rpartition(":")
        self._service = (host, int(port))
        server = socket.create_server(("127.0.0.1", 0))
        self.where = "{}:{}".format(*server.getsockname())
        self.connections = 0
        self._is_cut = False
        self._ends: list[socket.socket] = []
        self._silent: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._acceptor = Acceptor(server, self._relay, places=64, name="relay")

    def _relay(self, near: socket.socket) -> None:
        if self._is_cut:
            return
        with socket.create_connection(self._service) as far:
            with self._lock:
                self.connections += 1
                self._ends += [near, far]
            back = threading.Thread(target=self._carry, args=(far, near), daemon=True)
            back.start()
            self._carry(near, far)
            back.join()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if source not in self._silent:
                    target.sendall(data)
        for each in (source, target) if source not in self._silent else ():
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def silence(self) -> None:
        """Bring nothing more on the connections that there are."""
        with self._lock:
            self._silent.update(self._ends)

    def cut(self) -> None:
        """End all connections, and refuse others."""
        self._is_cut = True
        with self._lock:
            for each in self._ends:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Take connections again."""
        self._is_cut = False

    def close(self) -> None:
        """End all connections."""
        self._acceptor.close()
        self.cut()


@contextmanager
def relay(service: str) -> Iterator[Relay]:
    """Relay to a service."""
    made = Relay(service)
    try:
        yield made
    finally:
        made.close()
