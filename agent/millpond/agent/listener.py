"""Edge: the agent's one port. TLS is the host's control; plain connections must show a ticket first."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading

from millpond.agent.gate import CanaryError
from millpond.agent.session import Device
from millpond.wire import tls
from millpond.wire.channel import Channel
from millpond.wire.control import Attach
from millpond.wire.deadline import Deadline
from millpond.wire.errors import ConnectionLost, MillpondError, ProtocolError, RemoteError, VersionMismatch
from millpond.wire.frame import Limits
from millpond.wire.message import Failure, Ok

log = logging.getLogger(__name__)

FIRST_WORD_SECONDS = 10.0
CONNECTIONS = 64
_TLS_HANDSHAKE = 0x16
_IP_FREEBIND = 15  # Linux; Python has no name for it
_STRANGER = Limits(head=4096, payload=0)
_HOST = Limits(head=4 << 20, payload=1 << 34)


class Listener:
    """Accepts connections in threads of their own; ``stop`` ends the accepting."""

    def __init__(self, device: Device, context: ssl.SSLContext, address: str, port: int) -> None:
        self._device, self._context = device, context
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        self._server = _listen(address, port)
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def stop(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed by stop()
            while True:
                connection, _ = self._server.accept()
                if not self._places.acquire(blocking=False):
                    log.warning("more than %d connections: one refused", CONNECTIONS)
                    connection.close()
                    continue
                threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except (CanaryError, VersionMismatch) as error:
            log.error("connection cut: %s", error)
        except ConnectionLost as error:
            log.info("connection ended: %s", error)
        except MillpondError as error:
            log.warning("connection refused: %s", error)
        finally:
            connection.close()
            self._places.release()

    def _serve(self, connection: socket.socket) -> None:
        deadline = Deadline.after(FIRST_WORD_SECONDS)
        first = _peek(connection, deadline)
        if first == _TLS_HANDSHAKE:
            secure = tls.accept(connection, self._context, tls.HOST, deadline)
            with Channel(secure, "host", limits=_HOST, outlet=self._device.gate.outlet()) as host:
                self._serve_host(host)
        else:
            outlet = self._device.gate.outlet()
            with Channel(connection, "a client", limits=_STRANGER, outlet=outlet) as stranger:
                head = stranger.receive(deadline)
                if not isinstance(head.message, Attach):
                    raise ProtocolError("a plain connection must show its ticket first")
                self._attach(stranger, head.message, deadline, encrypted=False)

    def _serve_host(self, host: Channel) -> None:
        """A TLS connection is control, until it shows a ticket for encrypted bulk."""
        deadline = Deadline.after(FIRST_WORD_SECONDS)
        try:
            if ticket := self._device.serve(host):
                self._attach(host, ticket, deadline, encrypted=True)
        except VersionMismatch as error:
            host.send(Failure("version", str(error)), deadline)
            raise

    def _attach(self, client: Channel, ticket: Attach, deadline: Deadline, *, encrypted: bool) -> None:
        purpose = self._device.redeem(ticket.token, encrypted)
        if purpose is None:
            client.send(Failure("ticket", "this ticket is not valid"), deadline)
            raise RemoteError("a ticket that is not valid was shown")
        client.send(Ok(), deadline)
        if purpose.worker is not None:
            outlet = self._device.gate.outlet()
            purpose.worker.relay(Channel(client.sock, "host", limits=_HOST, outlet=outlet))
        elif encrypted:
            self._relay_volume(client.sock)
        else:
            self._device.volume.hand_over(client.sock)

    def _relay_volume(self, host: socket.socket) -> None:
        """Stand between TLS, which cannot be handed to another process, and the volume server."""
        ours, theirs = socket.socketpair()
        self._device.volume.hand_over(theirs)
        towards = threading.Thread(target=_copy, args=(host, ours), daemon=True)
        towards.start()
        _copy(ours, host)
        towards.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    source.settimeout(None)
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 18):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


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
