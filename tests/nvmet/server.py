# SPDX-License-Identifier: Apache-2.0
"""Edge: run the target's loop over listening socket, connections and interface."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from itertools import islice

from nvmet.errors import FabricsViolation
from nvmet.interface import Interface
from nvmet.pdu import terminate
from nvmet.queue import MAX_BACKLOG, Queue
from nvmet.subsystem import Subsystem
from nvmet.vendor_commands import VendorCommands

log = logging.getLogger(__name__)

_PACKETS_PER_ROUND = 32
_BUFFERS_PER_CALL = 64
_ROUNDS = 4


class _Client:
    """A connection and its queue."""

    def __init__(self, sock: socket.socket, queue: Queue) -> None:
        self.sock, self.queue = sock, queue
        self.interest = selectors.EVENT_READ
        self.unfinished = False
        """Whether commands may wait in its reader, which may be full of them, for the next round."""

    @property
    def receives(self) -> bool:
        """Whether its reader has room and its answers are being sent."""
        return not self.unfinished and self.queue.backlog < MAX_BACKLOG


class TargetServer:
    """Serves ``subsystem`` on a listening socket; packets of ``interface`` go to ``vendor``."""

    def __init__(
        self,
        listener: socket.socket,
        subsystem: Subsystem,
        vendor: VendorCommands,
        interface: Interface,
        stop: int,
    ) -> None:
        self._subsystem, self._vendor, self._interface = subsystem, vendor, interface
        self._listener, self._stop = listener, stop
        self._clients: dict[Queue, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._watches_interface = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(stop, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the descriptor ``stop`` is readable. Raises InterfaceGone and Orphaned."""
        while True:
            events = self._selector.select(self._timeout())
            for key, mask in events:
                if key.fileobj == self._stop:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Client):
                    self._serve(key.data, mask)
            self._subsystem.expire()
            self._feed()
            self._end_round()

    def close(self) -> None:
        """Close the listening socket and all connections."""
        self._listener.close()
        for client in self._clients.values():
            client.sock.close()
        self._selector.close()

    def _timeout(self) -> float | None:
        """Return the seconds until the next deadline, None without one."""
        due = self._subsystem.next_expiry()
        return None if due is None else max(0.0, due - time.monotonic())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # it has left again
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(sock, self._subsystem.new_queue())
        self._clients[client.queue] = client
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _serve(self, client: _Client, mask: int) -> None:
        if client.queue not in self._clients:
            return
        if mask & selectors.EVENT_WRITE:
            self._process(client)
        if mask & selectors.EVENT_READ and client.receives and client.queue in self._clients:
            self._receive(client)
        self._drop_doomed()

    def _receive(self, client: _Client) -> None:
        try:
            count = client.sock.recv_into(client.queue.reader.space())
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._drop(client)
            return
        self._subsystem.note_traffic(client.queue)
        client.queue.reader.filled(count)
        self._process(client)

    def _process(self, client: _Client) -> None:
        """Process received commands and send the answers; few at a time, because other connections wait."""
        queue = client.queue
        for _ in range(_ROUNDS):
            try:
                queue.process()
            except FabricsViolation as error:
                log.warning("connection terminated: %s", error)
                queue.outgoing.append(terminate(error.fatal))
                self._send(client)
                self._drop(client)
                return
            client.unfinished = queue.backlog >= MAX_BACKLOG
            self._send(client)
            if not client.unfinished or queue.backlog >= MAX_BACKLOG or queue not in self._clients:
                return

    def _send(self, client: _Client) -> None:
        """Send as many answers as the socket takes now."""
        queue = client.queue
        while queue.outgoing:
            try:
                queue.sent(client.sock.sendmsg(islice(queue.outgoing, _BUFFERS_PER_CALL)))
            except BlockingIOError:
                return
            except OSError:
                self._drop(client)
                return

    def _feed(self) -> None:
        """Complete RECVs with packets of the interface."""
        for _ in range(_PACKETS_PER_ROUND):
            if not self._vendor.can_deliver or (packet := self._interface.read()) is None:
                return
            client = self._clients[self._vendor.deliver(packet)]
            self._send(client)
            if client.queue.backlog:
                self._interface.keep()

    def _end_round(self) -> None:
        for client in list(self._clients.values()):
            if client.queue.outgoing and client.interest == selectors.EVENT_READ:
                self._send(client)
        self._drop_doomed()
        for client in self._clients.values():
            self._watch(client)
        if self._watches_interface != self._vendor.can_deliver:
            self._watch_interface(self._vendor.can_deliver)

    def _watch_interface(self, wanted: bool) -> None:
        self._watches_interface = wanted
        if wanted:
            self._selector.register(self._interface.descriptor, selectors.EVENT_READ)
        else:
            self._selector.unregister(self._interface.descriptor)

    def _watch(self, client: _Client) -> None:
        reads = selectors.EVENT_READ if client.receives else 0
        writes = selectors.EVENT_WRITE if client.queue.outgoing or client.unfinished else 0
        interest = reads | writes
        if interest != client.interest:
            client.interest = interest
            self._selector.modify(client.sock, interest, client)

    def _drop_doomed(self) -> None:
        while self._subsystem.doomed:
            client = self._clients.get(self._subsystem.doomed.pop())
            if client is not None:
                self._drop(client)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.queue, None) is not None:
            self._selector.unregister(client.sock)
            client.sock.close()
            self._subsystem.lost(client.queue)
