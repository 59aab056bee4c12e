# SPDX-License-Identifier: Apache-2.0
"""Edge: a LAN between emulated boards: a bridge in the machine's network namespace, and a link to each board.

The machine itself has no address on the LAN. Each link is shaped at both ends; all ends with the namespaces.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from millpond.base.errors import LocalError
from millpond.base.keys import Key
from millpond.linux.child import in_child, leave_out_local_address

if TYPE_CHECKING:
    from pyroute2 import IPRoute

BRIDGE = "mp-lan"
INTERFACE = "lan0"
"""The name of a board's interface."""
_APPEAR_SECONDS = 10.0
_LEAST_BURST = 15_000
_BURST_SECONDS = 0.001
_QUEUE_SECONDS = 0.05
_LEAST_QUEUE = 512_000


@dataclass(frozen=True, slots=True)
class LinkShape:
    """The shape of an emulated LAN: of the link of each board, in each direction."""

    mbit: Annotated[float, Key("Mbit per second; 0: as fast as it can", 0, 1e6)] = 0.0
    delay_ms: Annotated[float, Key("the delay in milliseconds", 0, 10_000)] = 0.0
    loss: Annotated[float, Key("the share of packets that are lost", 0, 1)] = 0.0
    mtu: Annotated[int, Key("the largest packet, in bytes", 576, 65_535)] = 1500


@dataclass(frozen=True, slots=True)
class BoardLink:
    """The link of one board: its ``address`` with the prefix length, and its shape."""

    address: str
    shape: LinkShape


def make_bridge() -> None:
    """Make the bridge of this network namespace. Raises LocalError."""

    def work(netlink: IPRoute) -> None:
        netlink.link("add", ifname=BRIDGE, kind="bridge")
        (index,) = netlink.link_lookup(ifname=BRIDGE)
        leave_out_local_address(netlink, index)
        netlink.link("set", index=index, state="up")

    _run(work, "the devices' LAN cannot be made")


def attach(name: str, pid: int, shape: LinkShape) -> None:
    """Join a board to the bridge, once its process ``pid`` has a network of its own. Raises LocalError."""
    _wait_for_network(pid)
    port = f"l-{name}"

    def work(netlink: IPRoute) -> None:
        for index in netlink.link_lookup(ifname=port):  # of the board before it was switched off
            netlink.link("del", index=index)
        peer = {"ifname": INTERFACE, "net_ns_pid": pid}
        netlink.link("add", ifname=port, kind="veth", mtu=shape.mtu, peer=peer)
        (index,) = netlink.link_lookup(ifname=port)
        (bridge,) = netlink.link_lookup(ifname=BRIDGE)
        leave_out_local_address(netlink, index)
        netlink.link("set", index=index, master=bridge, state="up")
        _shape(netlink, index, shape)

    _run(work, f"{name} cannot be joined to the devices' LAN")


def configure(link: BoardLink) -> None:
    """Set up a board's end of its link, from inside, as soon as it is there. Raises LocalError."""
    deadline = time.monotonic() + _APPEAR_SECONDS
    while INTERFACE not in (name for _, name in socket.if_nameindex()):
        if time.monotonic() > deadline:
            raise LocalError(f"the interface {INTERFACE} does not appear")
        time.sleep(0.01)
    address = ipaddress.IPv4Interface(link.address)

    def work(netlink: IPRoute) -> None:
        (index,) = netlink.link_lookup(ifname=INTERFACE)
        netlink.addr("add", index=index, address=str(address.ip), prefixlen=address.network.prefixlen)
        leave_out_local_address(netlink, index)
        netlink.link("set", index=index, mtu=link.shape.mtu)
        netlink.link("set", index=index, state="up")
        _shape(netlink, index, link.shape)

    _run(work, f"the interface {INTERFACE} cannot be set up")


def _shape(netlink: IPRoute, index: int, shape: LinkShape) -> None:
    """Shape what leaves by an interface: the delay and loss first, behind them the rate."""
    parent: dict[str, Any] = {"root": True}
    if shape.delay_ms or shape.loss:
        kept = {"delay": round(1000 * shape.delay_ms), "loss": 100 * shape.loss}
        netlink.tc("add", "netem", index, 0x10000, **kept, **parent)
        parent = {"parent": 0x10001}
    if shape.mbit:
        rate = shape.mbit * 125_000  # bytes per second
        burst = max(_LEAST_BURST, shape.mtu, round(_BURST_SECONDS * rate))
        limit = max(_LEAST_QUEUE, round(_QUEUE_SECONDS * rate))
        netlink.tc("add", "tbf", index, 0x20000, rate=round(rate), burst=burst, limit=limit, **parent)


def _run(work: Callable[[IPRoute], None], what: str) -> None:
    if problem := in_child(work):
        missing = "No such file" in problem
        raise LocalError(f"{what}: {problem}{'; does this kernel have netem?' if missing else ''}")


def _wait_for_network(pid: int) -> None:
    own, deadline = Path("/proc/self/ns/net").stat().st_ino, time.monotonic() + _APPEAR_SECONDS
    while Path(f"/proc/{pid}/ns/net").stat().st_ino == own:
        if time.monotonic() > deadline:
            raise LocalError(f"process {pid} has no network of its own")
        time.sleep(0.005)
