# SPDX-License-Identifier: Apache-2.0
"""Edge: set an interface's address, MTU and state by netlink."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from millpond.base.errors import LocalError
from millpond.linux.child import in_child, leave_out_local_address
from millpond.linux.netlink import rtnetlink
from millpond.tunnel.addresses import Address, Network
from millpond.tunnel.errors import InterfaceGone

if TYPE_CHECKING:
    from pyroute2 import IPRoute


def configure(interface: str, address: Address, mtu: int, peers: Network | None, *, routed: bool) -> None:
    """Configure an interface as ``Tun.configure`` describes. Raises LocalError."""

    def work(netlink: IPRoute) -> None:
        (index,) = netlink.link_lookup(ifname=interface)
        if peers is not None:  # a new interface has the machine's default
            rtnetlink.set_forwarding(interface, on=False)
        leave_out_local_address(netlink, index)
        netlink.link("set", index=index, mtu=mtu)
        netlink.addr("add", index=index, address=str(address.ip), prefixlen=address.network.prefixlen)
        netlink.link("set", index=index, state="up")
        if peers is not None and routed:
            netlink.route("add", dst=str(peers), oif=index)

    if problem := in_child(work):
        raise LocalError(f"interface {interface} cannot be set up: {problem}")


def set_mtu(interface: str, mtu: int) -> None:
    """Change the MTU, bytes. Raises InterfaceGone, and LocalError if it cannot be changed now."""

    def work(netlink: IPRoute) -> None:
        (index,) = netlink.link_lookup(ifname=interface)
        netlink.link("set", index=index, mtu=mtu)

    if problem := in_child(work):
        if interface not in (name for _, name in socket.if_nameindex()):
            raise InterfaceGone(f"interface {interface} is gone")
        raise LocalError(f"interface {interface} takes no MTU of {mtu}: {problem}")
