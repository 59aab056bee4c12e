# SPDX-License-Identifier: Apache-2.0
"""Entry: the confined process of a reduction node: no volume, no torch, and no network of its own.

Other nodes come to a listening socket by mutual TLS under the job's own authority; the host's connections,
and those to other nodes, are opened by the agent and passed here.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np

from millpond.agent.gate import CanaryError, Gate, LedgerCounters, Pattern
from millpond.agent.node.memory import DIAL, PARENT, YES, OfferedExchange
from millpond.aggregate.datagram_rounds import DatagramRounds
from millpond.aggregate.node import ReductionNode
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, MillpondError
from millpond.linux import memory
from millpond.linux.malloc import trim_heap
from millpond.linux.sockets import passed_connections, receive_with_descriptors
from millpond.wire import tls
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits
from millpond.wire.messages import Kind

log = logging.getLogger(__name__)
LIMITS = Limits(head=4 << 20, payload=1 << 34)
PLACES = 256
"""The most connections at once."""
_DIAL_SECONDS = 10.0
_LONGEST_REASON = 400


class NodeServer:
    """Serves parents, each in a thread. Everything sent passes ``gate``."""

    def __init__(self, name: str, gate: Gate, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
        self._name, self._gate = name, gate
        self._accepting, self._dialling = contexts
        self._places = threading.BoundedSemaphore(PLACES)
        self._dial_socket: socket.socket | None = None
        self._dial_lock = threading.Lock()
        self.node: ReductionNode | None = None

    def dial_over(self, sock: socket.socket) -> None:
        """Ask the agent at the other end of ``sock`` for connections to other nodes."""
        self._dial_socket = sock

    def dial(self, name: str) -> Channel:
        """Return a channel to another node. Raises RemoteError."""
        deadline = Deadline.after(_DIAL_SECONDS)
        connection = tls.connect(self._connection_to(name), self._dialling, name, deadline)
        return Channel(connection, name, limits=LIMITS, outlet=self._gate.outlet())

    def _connection_to(self, name: str) -> socket.socket:
        assert self._dial_socket
        with self._dial_lock:
            try:
                self._dial_socket.send(DIAL + name.encode())
                reason = bytearray(_LONGEST_REASON)
                size, descriptors = receive_with_descriptors(self._dial_socket, reason, 1)
            except OSError as error:
                raise ConnectionLost(f"{name}: {error.strerror or error}") from None
        if not descriptors:
            raise ConnectionLost(f"{name}: {reason[:size].decode(errors='replace')}")
        return socket.socket(fileno=descriptors[0])

    def _is_parent(self, name: str) -> bool:
        """Return whether the host has made the node ``name`` a parent of this one."""
        assert self._dial_socket
        with self._dial_lock:
            try:
                self._dial_socket.send(PARENT + name.encode())
                return bool(self._dial_socket.recv(1) == YES)
            except OSError:
                return False

    def accept_nodes(self, listener: socket.socket) -> None:
        """Serve other nodes, for ever."""
        while True:
            connection, _ = listener.accept()
            self._start(connection, secure=True)

    def accept_host(self, agent: socket.socket) -> None:
        """Serve the connections that the agent passes, until it ends."""
        for connection in passed_connections(agent):
            self._start(connection, secure=False)

    def _start(self, connection: socket.socket, *, secure: bool) -> None:
        if not self._places.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._run, args=(connection, secure), daemon=True).start()

    def _run(self, connection: socket.socket, secure: bool) -> None:
        try:
            self._serve(connection, secure)
        except (ConnectionLost, OSError):
            pass
        except CanaryError as error:
            log.error("connection cut: %s", error)
        except MillpondError as error:
            log.info("connection ended: %s", error)
        finally:
            self._places.release()

    def _serve(self, connection: socket.socket, secure: bool) -> None:
        assert self.node
        name, permitted = "the host", _always
        if secure:
            secured = tls.accept(connection, self._accepting, None, Deadline.after(_DIAL_SECONDS))
            connection, name = secured, tls.peer_name(secured)
            permitted = partial(self._is_parent, name)
        with Channel(connection, name, limits=LIMITS, outlet=self._gate.outlet()) as parent:
            self.node.serve(parent, permitted)


def _always() -> bool:
    return True


def main(settings_descriptor: str, *numbers: str) -> None:
    """Serve until the agent closes its end. The settings are JSON in a memory file; the others are
    descriptors, in the order in which the agent's ``NodeProcess`` passes them.
    """
    logging.basicConfig(level=logging.INFO, format="node: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which a service manager may send to all of a unit
    values, state, offered, tally, account, listener, dials, agent, *lan = map(int, numbers)
    with os.fdopen(int(settings_descriptor), "rb") as file:
        settings = json.load(file)
    sought = [Pattern(name, bytes.fromhex(data), stops) for name, data, stops in settings["patterns"]]
    gate = Gate(sought, LedgerCounters(tally), LedgerCounters(account))
    server = NodeServer(settings["name"], gate, _contexts(settings))
    update = np.frombuffer(memory.map_read_only(values, settings["update_bytes"]), np.float32)
    spread = np.frombuffer(memory.map_second(state, 4 * settings["size"]).data, np.float32)
    offers = OfferedExchange(offered).__contains__
    datagrams = None
    if lan:
        hub, own = (socket.socket(fileno=descriptor) for descriptor in lan)
        counted = partial(_passing, gate), partial(gate.count, Kind.PARAMETERS)
        datagrams = DatagramRounds(hub, own, settings["mtu"], settings["network"], *counted)
    server.node = ReductionNode(settings["name"], update, spread, server.dial, offers, datagrams)
    server.dial_over(socket.socket(fileno=dials))
    accepting = socket.socket(fileno=listener)
    accepting.settimeout(None)
    threading.Thread(target=server.accept_nodes, args=(accepting,), daemon=True).start()
    trim_heap()
    server.accept_host(socket.socket(fileno=agent))


def _passing(gate: Gate, vector: memoryview) -> None:
    """Count and search a vector that leaves in datagrams."""
    gate.outlet().passing(Kind.PARAMETERS, vector, payload=True)


def _contexts(settings: dict[str, str]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a server and a client. Certificate and key are in a memory file meanwhile: ssl
    reads no other than files.
    """
    descriptor = os.memfd_create("identity")
    try:
        os.write(descriptor, (settings["certificate"] + settings["key"]).encode())
        chain = Path(f"/proc/self/fd/{descriptor}")
        server, client = (tls.context_of(settings["authority"], chain, server=one) for one in (True, False))
    finally:
        os.close(descriptor)
    return server, client


if __name__ == "__main__":
    main(*sys.argv[1:])
