# SPDX-License-Identifier: Apache-2.0
"""Edge: relays between an encrypted connection, which is this process's own, and a server's process."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable

from millpond.linux import sockets

SECONDS = 60.0


def relay(peer: socket.socket, hand_over: Callable[[socket.socket], None]) -> None:
    """Relay between ``peer``, of a TLS connection, and the server that gets the other end, until one ends.

    One thread for both directions: OpenSSL allows no two in one connection. Requests and replies take turns,
    so sending cannot block both ways.
    """
    ours, theirs = socket.socketpair()
    hand_over(theirs)
    with ours, contextlib.suppress(OSError):
        peer.settimeout(SECONDS)
        ours.settimeout(SECONDS)
        while _relay_once(peer, ours):
            pass


def is_readable(sock: socket.socket, seconds: float | None = None) -> bool:
    """Wait until a connection, encrypted or not, has something or has ended, at most ``seconds``; return
    whether it has.
    """
    return _has_read(sock) or bool(sockets.readable([sock], seconds))


def _has_read(sock: socket.socket) -> bool:
    """Return whether OpenSSL has more than the kernel tells."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0


def _relay_once(peer: socket.socket, server: socket.socket) -> bool:
    """Wait for either side and pass its data on; return False when one has ended."""
    ready = [peer] if _has_read(peer) else sockets.readable([peer, server])
    for source in ready:
        data = source.recv(1 << 18)
        if not data:
            return False
        (server if source is peer else peer).sendall(data)
    return True
