# SPDX-License-Identifier: Apache-2.0
"""Edge: serve one shared memory to QEMU and the host's endpoint, and eventfds between them.

A process of its own: QEMU connects once, when it starts, while host endpoints come and go.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import socket
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.linux import sockets
from millpond.tunnel.ring.layout import QUEUES, Layout
from millpond.tunnel.transports.ivshmem.server_protocol import NUMBER, Delivery, ServerMessage, Switchboard

log = logging.getLogger(__name__)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LONGEST_BACKLOG = 4096
"""Most messages that wait for a client that does not read, such as a stopped QEMU; beyond, it is dropped."""


class _Client:
    """A peer's socket and eventfds, and the messages that wait to be sent to it."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.vectors = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(QUEUES)]
        self.waiting: deque[ServerMessage] = deque()

    def flush(self) -> None:
        """Send the messages that can be sent now. Raises OSError when the client is gone."""
        while self.waiting:
            message = self.waiting[0]
            descriptors = [] if message.descriptor is None else [message.descriptor]
            try:
                socket.send_fds(self.socket, [NUMBER.pack(message.number)], descriptors)
            except BlockingIOError:
                return
            self.waiting.popleft()

    def close(self) -> None:
        """Close the socket and the eventfds; peers that have received these keep theirs."""
        self.socket.close()
        for vector in self.vectors:
            os.close(vector)


class DoorbellServer:
    """Listens at ``path`` with memory for queues of ``entries``. A context manager. Raises LocalError."""

    def __init__(self, path: Path, entries: int) -> None:
        self._path = path
        self._undo = ExitStack()
        try:
            self._listener = sockets.listen(path)
        except OSError as error:
            raise LocalError(f"cannot listen at {path}: {error.strerror}") from None
        self._undo.callback(self._unlisten, path.stat().st_ino)
        self._listener.setblocking(False)
        self._memory = make_memory(bar_size(entries))
        self._undo.callback(os.close, self._memory)
        self._switchboard = Switchboard(self._memory)
        self._clients: dict[int, _Client] = {}

    def serve(self, stop: int) -> None:
        """Serve until the descriptor ``stop`` is readable."""
        while True:
            poll = select.poll()
            for descriptor in (stop, self._listener.fileno()):
                poll.register(descriptor, select.POLLIN)
            for client in self._clients.values():
                poll.register(client.socket, select.POLLIN | (select.POLLOUT if client.waiting else 0))
            ready = dict(poll.poll())
            if stop in ready:
                return
            for peer, client in list(self._clients.items()):
                if events := ready.get(client.socket.fileno()):
                    self._handle_events(peer, client, events)
            if self._listener.fileno() in ready:
                self._accept()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            log.warning("a client was lost while it connected: %s", error)
            return
        sock.setblocking(False)
        client = _Client(sock)
        peer, deliveries = self._switchboard.join(client.vectors)
        self._clients[peer] = client
        log.info("peer %d has come", peer)
        self._deliver(deliveries)

    def _handle_events(self, peer: int, client: _Client, events: int) -> None:
        if self._clients.get(peer) is not client:
            return  # dropped a moment ago
        if events & ~select.POLLOUT:  # clients send nothing, so it has closed
            self._drop(peer, "has left")
        else:
            self._flush(peer, client)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        touched = {delivery.to for delivery in deliveries}
        for delivery in deliveries:
            self._clients[delivery.to].waiting.append(delivery.message)
        for peer in touched:
            if client := self._clients.get(peer):
                self._flush(peer, client)

    def _flush(self, peer: int, client: _Client) -> None:
        try:
            client.flush()
        except OSError as error:
            self._drop(peer, f"has left: {error.strerror}")
            return
        if len(client.waiting) > _LONGEST_BACKLOG:
            self._drop(peer, "does not read its messages")

    def _drop(self, peer: int, reason: str) -> None:
        log.info("peer %d %s", peer, reason)
        gone = self._clients.pop(peer)
        for client in self._clients.values():  # its eventfds are closed next: they can be announced no more
            unsent = client.waiting
            client.waiting = deque(message for message in unsent if message.descriptor not in gone.vectors)
        gone.close()
        self._deliver(self._switchboard.leave(peer))

    def _unlisten(self, inode: int) -> None:
        self._listener.close()
        with suppress(OSError):  # gone already, or not ours to remove any more
            if self._path.stat().st_ino == inode:
                self._path.unlink()

    def __enter__(self) -> DoorbellServer:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()
        self._undo.close()


def bar_size(entries: int) -> int:
    """Return the size of a PCI BAR, a power of 2 in bytes, that holds the region of queues
    with ``entries``.
    """
    return 1 << (Layout(entries).size - 1).bit_length()


def make_memory(size: int) -> int:
    """Make a sealed memory file: nobody, QEMU's guest included, can shorten it under a process
    that maps it.
    """
    descriptor = os.memfd_create("millpond-ivshmem", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor
