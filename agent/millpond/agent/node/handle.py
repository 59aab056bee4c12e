# SPDX-License-Identifier: Apache-2.0
"""Edge: a reduction node on the device, as the agent sees it: starts its process, and opens its connections.

The process is confined: it has a user of its own, sees neither volume nor files of jobs, and reaches nothing
but the connections that it is given. To other nodes the agent connects it, to those alone that the host has
named, on the devices' own network or the fleet's.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO

from millpond.agent.config import AgentConfig
from millpond.agent.gate import LedgerCounters, Pattern
from millpond.agent.node.memory import NodeMemory
from millpond.aggregate.messages import GetNodeTicket, NodeReady, SetPeers, StartNode
from millpond.base.errors import ProtocolError, Refused
from millpond.linux.confinement.sandbox import Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandboxed_process import end, start
from millpond.linux.sockets import send_descriptors
from millpond.wire.control_messages import Ticket
from millpond.wire.messages import Message, Ok

log = logging.getLogger(__name__)
DIAL_SECONDS = 3.0
_LONGEST_NAME = 64


class NodeProcess:
    """The process of a node with ``memory``. Its bytes are counted in ``tally``."""

    def __init__(
        self,
        config: AgentConfig,
        request: StartNode,
        memory: NodeMemory,
        patterns: Sequence[Pattern],
        tally: LedgerCounters,
    ) -> None:
        self.memory = memory
        self._peers: dict[str, tuple[str, int]] = {}
        self._networks = [ipaddress.ip_network(text) for text in networks(config)]
        self._lock = threading.Lock()
        address = node_address(config)
        settings = {
            "name": config.name,
            "size": memory.size,
            "patterns": [(each.name, each.data.hex(), each.forbidden) for each in patterns],
            "authority": request.authority,
            "certificate": request.certificate,
            "key": request.key,
        }
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as failed:
            listener = passed.enter_context(socket.create_server((address, 0), backlog=64))
            self._agent, agent = _pair(passed, failed, socket.SOCK_STREAM)
            self._dials, dials = _pair(passed, failed, socket.SOCK_SEQPACKET)
            known = passed.enter_context(_memory_file(json.dumps(settings).encode()))
            others = [each.fileno() for each in (listener, dials, agent)]
            descriptors = [known.fileno(), *memory.descriptors, tally.descriptor, *others]
            module = [sys.executable, "-m", "millpond.agent.node.process", *map(str, descriptors)]
            self.process = start(_sandbox(config), module, pass_fds=descriptors)
            lan = bool(config.lan)
            self.ready = NodeReady(address, listener.getsockname()[1], lan)
            failed.pop_all()
        threading.Thread(target=self._dial_for_node, name="node's dials", daemon=True).start()

    def set_peers(self, peers: dict[str, tuple[str, int]]) -> None:
        """Allow connections to these nodes alone. Raises Refused."""
        for name, (address, _) in peers.items():
            with contextlib.suppress(ValueError):
                if any(ipaddress.ip_address(address) in network for network in self._networks):
                    continue
            raise Refused("", "node", f"{name} has the address {address}, on no network of the fleet")
        self._peers = dict(peers)

    def hand_over(self, connection: socket.socket) -> None:
        """Give the node a connection of the host; this process's copy is closed."""
        with self._lock, connection:
            send_descriptors(self._agent, [connection.fileno()])

    def _dial_for_node(self) -> None:
        """Connect the node to those that it asks for, until its process ends."""
        with contextlib.suppress(OSError):
            while name := self._dials.recv(_LONGEST_NAME):
                place = self._peers.get(name.decode(errors="replace"))
                try:
                    if place is None:
                        raise OSError(None, "the host has not named this node")
                    with socket.create_connection(place, DIAL_SECONDS) as connection:
                        connection.settimeout(None)
                        send_descriptors(self._dials, [connection.fileno()])
                except OSError as error:
                    self._dials.send((error.strerror or str(error)).encode()[:200])

    def stop(self) -> None:
        """End the process."""
        for each in (self._agent, self._dials):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        end(self.process)
        self._agent.close()
        self._dials.close()


class NodeRequests:
    """Answers the requests about a node on one control connection. ``start`` starts the node's process,
    ``issue`` returns a ticket for a connection with it.
    """

    def __init__(
        self,
        start: Callable[[StartNode], NodeProcess],
        issue: Callable[[NodeProcess, bool], Ticket],
    ) -> None:
        self._start, self._issue = start, issue
        self._node: NodeProcess | None = None

    def answer(self, request: Message) -> Message:
        """Return the answer to a request. Raises RemoteError."""
        if isinstance(request, StartNode):
            self.close()
            self._node = self._start(request)
            return self._node.ready
        if self._node is None or not isinstance(request, (SetPeers, GetNodeTicket)):
            raise ProtocolError(f"the host sent '{request.NAME}' on a connection that holds a job")
        if isinstance(request, SetPeers):
            self._node.set_peers(request.peers)
            return Ok()
        return self._issue(self._node, request.tls)

    def close(self) -> None:
        """End the node, if there is one."""
        if self._node:
            self._node.stop()
            self._node = None


def node_address(config: AgentConfig) -> str:
    """Return the address at which other nodes reach this device's: on the LAN if it has one."""
    return (config.lan or config.link.address).partition("/")[0]


def networks(config: AgentConfig) -> list[str]:
    """Return the networks on which other nodes can be."""
    own = str(ipaddress.ip_interface(config.lan).network) if config.lan else ""
    return [text for text in (own, config.link.peers) if text]


def _pair(
    passed: contextlib.ExitStack, failed: contextlib.ExitStack, kind: socket.SocketKind
) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    failed.callback(ours.close)
    return ours, passed.enter_context(theirs)


def _memory_file(data: bytes) -> IO[bytes]:
    file = os.fdopen(os.memfd_create("settings"), "w+b", buffering=0)
    file.write(data)
    file.seek(0)
    return file


def _sandbox(config: AgentConfig) -> Sandbox:
    return Sandbox(
        binds=(*system_binds(), *python_binds()),
        own_network=True,
        own_pids=True,
        uid=config.users.node,
    )
