# SPDX-License-Identifier: Apache-2.0
"""Edge: the agent's one port. TLS is the host's control; plain connections must show a ticket first."""

from __future__ import annotations

import ipaddress
import logging
import socket

from millpond.agent.control import AgentService
from millpond.agent.gate import CanaryError
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, MillpondError, ProtocolError, RemoteError, VersionMismatch
from millpond.wire import tls
from millpond.wire.acceptor import Acceptor
from millpond.wire.channel import Channel
from millpond.wire.connection_limits import ConnectionPlace, ConnectionPlaces
from millpond.wire.control_messages import Attach
from millpond.wire.framing import Limits
from millpond.wire.messages import Failure, Ok
from millpond.wire.relay import relay

log = logging.getLogger(__name__)

FIRST_WORD_SECONDS = 10.0
CONNECTIONS = 64
"""Connections of the host, as many of strangers that are silent, and as many of those that have said
something; a stranger has FIRST_WORD_SECONDS to become the host.
"""
_OF_A_JOB = 2
"""A job's connections: for control and for its parameters."""
_RELAYED = 512
"""Encrypted connections of volumes and nodes, which take none of these places: a busy mount has a hundred."""
_MOST_THREADS = 4 * CONNECTIONS + _RELAYED
"""Threads of connections, some of which have just lost their places."""
_TLS_HANDSHAKE = 0x16
_IP_FREEBIND = 15  # Linux; Python has no name for it
_STRANGER = Limits(head=4096, payload=0)
_HOST = Limits(head=4 << 20, payload=1 << 34)


class Listener:
    """Serves the host at ``address``, in a thread for each connection, until ``stop``.

    Only connections from the other end of the tunnel are served: the device's own users and other devices
    take no place. Any user of the host can connect, so a connection keeps its place only once it has shown
    the host's certificate or a ticket.
    """

    def __init__(
        self, service: AgentService, context: tls.CurrentContext, address: ipaddress.IPv4Interface, port: int
    ) -> None:
        self._service, self._context = service, context
        self._hosts = {str(host) for host in address.network.hosts()} - {str(address.ip)}
        server = _listen(str(address.ip), port)
        self._places = ConnectionPlaces(strangers=CONNECTIONS, known=CONNECTIONS, relayed=_RELAYED)
        self._acceptor = Acceptor(server, self._handle, places=_MOST_THREADS, name="listener")

    @property
    def alive(self) -> bool:
        """Return whether the listener still accepts connections."""
        return self._acceptor.alive

    @property
    def fault(self) -> str:
        """The reason why no job's connections are accepted, "" if they are."""
        left = self._places.left
        return (
            "" if left >= _OF_A_JOB else f"all but {left} of the agent's {CONNECTIONS} connections are in use"
        )

    def stop(self) -> None:
        """Take no more connections."""
        self._acceptor.close()

    def _handle(self, connection: socket.socket) -> None:
        source = connection.getpeername()[0]
        if source not in self._hosts:
            log.warning("connection refused: it came from %s, which is not the host", source)
            return
        place = self._places.enter(connection)
        try:
            with place:
                self._serve(connection, place)
        except (CanaryError, VersionMismatch) as error:
            log.error("connection cut: %s", error)
        except ConnectionLost as error:
            log.info("connection ended: %s", error)
        except MillpondError as error:
            level = logging.INFO if place.was_lost else logging.WARNING
            log.log(level, "connection refused: %s", error)

    def _serve(self, connection: socket.socket, place: ConnectionPlace) -> None:
        deadline = Deadline.after(FIRST_WORD_SECONDS)
        first = _peek(connection, deadline)
        place.spoke()
        if first == _TLS_HANDSHAKE:
            secure = tls.accept(connection, self._context.get(), tls.HOST, deadline)
            with Channel(secure, "host", limits=_HOST, outlet=self._service.gate.outlet()) as host:
                place.authenticated()
                self._serve_host(host, place)
        else:
            outlet = self._service.gate.outlet()
            with Channel(connection, "a client", limits=_STRANGER, outlet=outlet) as stranger:
                head = stranger.receive(deadline)
                if not isinstance(head.message, Attach):
                    raise ProtocolError("a plain connection must show its ticket first")
                self._attach(stranger, head.message, deadline, place, encrypted=False)

    def _serve_host(self, host: Channel, place: ConnectionPlace) -> None:
        """Serve control requests on a TLS connection, until it shows a ticket for encrypted bulk."""
        deadline = Deadline.after(FIRST_WORD_SECONDS)
        try:
            if ticket := self._service.serve(host):
                self._attach(host, ticket, deadline, place, encrypted=True)
        except VersionMismatch as error:
            host.send(Failure("version", str(error)), deadline)
            raise

    def _attach(
        self, client: Channel, ticket: Attach, deadline: Deadline, place: ConnectionPlace, *, encrypted: bool
    ) -> None:
        purpose = self._service.redeem(ticket.token, encrypted)
        if purpose is None:
            client.send(Failure("ticket", "this ticket is not valid"), deadline)
            raise RemoteError("a ticket that is not valid was shown")
        place.authenticated()
        client.send(Ok(), deadline)
        if purpose.worker is not None:
            outlet = purpose.worker.gate.outlet()
            purpose.worker.relay(Channel(client.sock, "host", limits=_HOST, outlet=outlet))
            return
        server = purpose.node or purpose.shared or self._service.volume
        if encrypted:
            place.relayed()
            relay(client.sock, server.hand_over)
        else:
            server.hand_over(client.sock)


def _listen(address: str, port: int) -> socket.socket:
    """Listen on the tunnel's address alone, which may come and go with the tunnel."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
    server.bind((address, port))
    server.listen(CONNECTIONS)
    return server


def _peek(connection: socket.socket, deadline: Deadline) -> int:
    connection.settimeout(deadline.remaining())
    try:
        first = connection.recv(1, socket.MSG_PEEK)
    except OSError as error:
        raise ConnectionLost(f"a client: {error.strerror or 'said nothing'}") from None
    if not first:
        raise ConnectionLost("a client left without a word")
    return first[0]
