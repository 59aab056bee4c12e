# SPDX-License-Identifier: Apache-2.0
"""Edge (namespaces, tc): a switch between nodes, which are network namespaces behind shaped links."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from bench.tunnel.namespace import Namespace

_SIOCETHTOOL, _ETHTOOL_SGRO = 0x8946, 0x2C
SHALLOW, DEEP = ("15kb", "limit 1500kb", "limit 512kb"), ("66kb", "latency 100ms", "latency 100ms")
"""The bucket of a link, and the buffers of a node and of its port in the switch."""
_NOTHING = 0xFFFFFFFF
_SHOT = 2
_RANDOM = 0xFFFFF038


@dataclass(frozen=True, slots=True)
class Lan:
    """The nodes of a LAN, whose addresses are 10.9.0.1 and so on, and its switch."""

    nodes: tuple[Namespace, ...]
    switch: Namespace

    def lose(self, share: float) -> None:
        """Let the switch drop a share of the packets that come from any node."""
        limit = int((1 - share) * _NOTHING)
        code = f"4,32 0 0 {_RANDOM},53 0 1 {limit},6 0 0 {_SHOT},6 0 0 {_NOTHING}"
        for number in range(len(self.nodes)):
            port = f"dev p{number}"
            _try(self.switch, f"tc qdisc del {port} clsact")
            if share:
                _do(self.switch, f"tc qdisc add {port} clsact")
                _do(self.switch, f"tc filter add {port} ingress bpf da bytecode", code)


def address(number: int) -> str:
    """Return the address of a node."""
    return f"10.9.0.{number + 1}"


@contextmanager
def lan(count: int, mbit: int, buffers: tuple[str, str, str] = SHALLOW) -> Iterator[Lan]:
    """Make a LAN of nodes with links of ``mbit`` both ways. The caller must have one thread only."""
    burst, node_queue, port_queue = buffers
    with ExitStack() as stack:
        switch, *nodes = (stack.enter_context(closing(Namespace())) for _ in range(count + 1))
        _do(switch, "ip link add br0 type bridge")
        _do(switch, "ip link set br0 up")
        for number, node in enumerate(nodes):
            _do(switch, f"ip link add name p{number} type veth peer name lan netns {node.file}")
            _do(switch, f"ip link set p{number} master br0 up")
            _do(node, f"ip address add {address(number)}/16 dev lan")
            _do(node, "ip link set lan up")
            shape = f"tbf rate {mbit}mbit burst {burst}"
            _do(switch, f"tc qdisc add dev p{number} root {shape} {port_queue}")
            _do(node, f"tc qdisc add dev lan root {shape} {node_queue}")
            _merge_received(node)
        yield Lan(tuple(nodes), switch)


def _merge_received(node: Namespace) -> None:
    """Let a node's interface merge packets of a stream as a network card's driver does (GRO)."""
    with node.entered(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        memory = ctypes.create_string_buffer(struct.pack("II", _ETHTOOL_SGRO, 1))
        request = struct.pack("16sP", b"lan", ctypes.addressof(memory))
        fcntl.ioctl(control, _SIOCETHTOOL, request.ljust(40, b"\0"))


def _do(where: Namespace, command: str, *more: str) -> None:
    with where.entered():
        subprocess.run([*command.split(), *more], check=True)


def _try(where: Namespace, command: str) -> None:
    with where.entered():
        subprocess.run(command.split(), check=False, stderr=subprocess.DEVNULL)
