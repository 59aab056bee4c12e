# SPDX-License-Identifier: Apache-2.0
"""Edge (descriptors): relays a connection from and to standard streams."""

from __future__ import annotations

import contextlib
import socket
import threading

from millpond.host.terminal import streams

_CHUNK = 1 << 18


def relay(connection: socket.socket, source: int, target: int) -> None:
    """Relay data from the descriptor ``source`` to the connection, and data from there to
    ``target``, until the peer has ended. The end of the source is passed on.
    """
    connection.settimeout(None)
    threading.Thread(target=_send, args=(connection, source), name="to the device", daemon=True).start()
    output = streams.WholeOutput(target)
    with contextlib.suppress(ConnectionError):  # its client says that the connection has ended
        while data := connection.recv(_CHUNK):
            output.write(data)


def _send(connection: socket.socket, source: int) -> None:
    with contextlib.suppress(OSError):
        while data := streams.read(source, _CHUNK):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
