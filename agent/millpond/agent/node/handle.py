# SPDX-License-Identifier: Apache-2.0
"""Edge: a reduction node on the device, as the agent sees it: starts its process, and opens its connections.

The process is confined: it has a user of its own, sees neither volume nor files of jobs, and reaches nothing
but the connections that it is given. To other nodes the agent connects it, to those alone that the host has
named, on the devices' own network or the fleet's. Where the device's policy allows it, the node also has two
UDP sockets on the devices' own network.
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

import psutil

from millpond.agent.config import AgentConfig
from millpond.agent.gate import LedgerCounters, Pattern
from millpond.agent.node.memory import PARENT, YES, NodeMemory
from millpond.aggregate.messages import GetNodeTicket, NodeReady, SetPeers, StartNode
from millpond.aggregate.udp.datagrams import RECEIVE_BUFFER, SEND_BUFFER
from millpond.base.errors import ProtocolError, Refused
from millpond.linux.confinement.sandbox import Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandboxed_process import end, start
from millpond.linux.sockets import send_descriptors, set_buffers
from millpond.wire.control_messages import JOB_PORTS, Ticket
from millpond.wire.messages import Message, Ok

log = logging.getLogger(__name__)
DIAL_SECONDS = 3.0
_LONGEST_QUESTION = 65


class NodeProcess:
    """The process of a node with ``memory``. Its bytes are counted in ``tally`` and in ``account``."""

    def __init__(
        self,
        config: AgentConfig,
        request: StartNode,
        memory: NodeMemory,
        patterns: Sequence[Pattern],
        tally: LedgerCounters,
        account: LedgerCounters,
    ) -> None:
        self.memory = memory
        self._allowed = SetPeers({})
        self._networks = [ipaddress.ip_network(text) for text in networks(config)]
        self._lock = threading.Lock()
        address, interface = node_address(config), _plain_lan(config)
        settings = {
            "name": config.name,
            "size": memory.size,
            "update_bytes": memory.update_bytes,
            "patterns": [(each.name, each.data.hex(), each.forbidden) for each in patterns],
            "authority": request.authority,
            "certificate": request.certificate,
            "key": request.key,
            "mtu": psutil.net_if_stats()[interface].mtu if interface else 0,
            "network": lan_network(config),
        }
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as failed:
            listener = passed.enter_context(socket.create_server((address, 0), backlog=64))
            self._agent, agent = _pair(passed, failed, socket.SOCK_STREAM)
            self._dials, dials = _pair(passed, failed, socket.SOCK_SEQPACKET)
            known = passed.enter_context(_memory_file(json.dumps(settings).encode()))
            datagrams = _lan_sockets(passed, address, interface) if interface else ()
            others = [each.fileno() for each in (listener, dials, agent, *datagrams)]
            counters = [tally.descriptor, account.descriptor]
            descriptors = [known.fileno(), *memory.descriptors, *counters, *others]
            module = [sys.executable, "-m", "millpond.agent.node.process", *map(str, descriptors)]
            self.process = start(_sandbox(config), module, pass_fds=descriptors)
            self.ready = NodeReady(address, listener.getsockname()[1], bool(config.lan))
            failed.pop_all()
        threading.Thread(target=self._answer_node, name="node's dials", daemon=True).start()

    def allow(self, request: SetPeers) -> None:
        """Allow connections to the peers alone, and requests of the parents alone. Raises Refused."""
        for name, (address, port) in request.peers.items():
            if port not in JOB_PORTS:  # a device tells its own: it may be another's SSH server
                raise Refused("", "node", f"{name} has the port {port}, which is no node's")
            with contextlib.suppress(ValueError):
                if any(ipaddress.ip_address(address) in network for network in self._networks):
                    continue
            raise Refused("", "node", f"{name} has the address {address}, on no network of the fleet")
        self._allowed = request

    def hand_over(self, connection: socket.socket) -> None:
        """Give the node a connection of the host; this process's copy is closed."""
        with self._lock, connection:
            send_descriptors(self._agent, [connection.fileno()])

    def _answer_node(self) -> None:
        """Answer what the node's process asks, until it ends."""
        with contextlib.suppress(OSError):
            while question := self._dials.recv(_LONGEST_QUESTION):
                name = question[1:].decode(errors="replace")
                if question[:1] == PARENT:
                    self._dials.send(YES if name in self._allowed.parents else b"-")
                else:
                    self._dial(self._allowed.peers.get(name))

    def _dial(self, place: tuple[str, int] | None) -> None:
        """Connect the node to a place."""
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
            self._node.allow(request)
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
    return [text for text in (lan_network(config), config.link.peers) if text]


def lan_network(config: AgentConfig) -> str:
    """Return the network of the devices' own LAN, "" without one."""
    return str(ipaddress.ip_interface(config.lan).network) if config.lan else ""


def _pair(
    passed: contextlib.ExitStack, failed: contextlib.ExitStack, kind: socket.SocketKind
) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    failed.callback(ours.close)
    return ours, passed.enter_context(theirs)


def _plain_lan(config: AgentConfig) -> str:
    """Return the interface of the LAN if updates may leave on it unencrypted, else ""."""
    known = psutil.net_if_addrs() if config.lan and config.policy.plain_lan else {}
    address = node_address(config)
    return next((name for name, found in known.items() if address in [each.address for each in found]), "")


def _lan_sockets(
    passed: contextlib.ExitStack, address: str, interface: str
) -> tuple[socket.socket, socket.socket]:
    """Return two UDP sockets at ``address``, which reach nothing but the network of ``interface``."""
    found = [passed.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(2)]
    for each in found:
        set_buffers(each, RECEIVE_BUFFER, SEND_BUFFER)  # here: the node's process may not have large ones
        each.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        each.bind((address, 0))
    return found[0], found[1]


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
