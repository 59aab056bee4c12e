# SPDX-License-Identifier: Apache-2.0
"""Edge: set an interface's address, MTU and state by netlink."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from millpond.base.errors import LocalError
from millpond.linux import rtnetlink
from millpond.linux.child import fork
from millpond.tunnel.addresses import Address, Network
from millpond.tunnel.errors import InterfaceGone

if TYPE_CHECKING:
    from pyroute2 import IPRoute

_NO_ADDRESS_OF_ITS_OWN = {"attrs": [["AF_INET6", {"attrs": [["IFLA_INET6_ADDR_GEN_MODE", 1]]}]]}
"""No IPv6 link-local address: with one the kernel sends router solicitations over the link for ever."""
_DONE, _FAILED = b"D", b"F"
_MAX_REPORT = 1000


def configure(interface: str, address: Address, mtu: int, peers: Network | None, *, routed: bool) -> None:
    """Configure an interface as ``Tun.configure`` describes. Raises LocalError."""

    def work(netlink: IPRoute) -> None:
        (index,) = netlink.link_lookup(ifname=interface)
        if peers is not None:  # a new interface has the machine's default
            rtnetlink.set_forwarding(interface, on=False)
        netlink.link("set", index=index, mtu=mtu, IFLA_AF_SPEC=_NO_ADDRESS_OF_ITS_OWN)
        netlink.addr("add", index=index, address=str(address.ip), prefixlen=address.network.prefixlen)
        netlink.link("set", index=index, state="up")
        if peers is not None and routed:
            netlink.route("add", dst=str(peers), oif=index)

    if problem := _in_a_child(work):
        raise LocalError(f"interface {interface} cannot be set up: {problem}")


def set_mtu(interface: str, mtu: int) -> None:
    """Change the MTU, bytes. Raises InterfaceGone, and LocalError if it cannot be changed now."""

    def work(netlink: IPRoute) -> None:
        (index,) = netlink.link_lookup(ifname=interface)
        netlink.link("set", index=index, mtu=mtu)

    if problem := _in_a_child(work):
        if interface not in (name for _, name in socket.if_nameindex()):
            raise InterfaceGone(f"interface {interface} is gone")
        raise LocalError(f"interface {interface} takes no MTU of {mtu}: {problem}")


def _in_a_child(work: Callable[[IPRoute], None]) -> str:
    """Run ``work`` in a forked child and return the reason for its failure, empty for success. pyroute2 takes
    25 MiB, which an endpoint would keep for its few messages.
    """

    def body(report: int) -> None:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            with IPRoute() as netlink:
                work(netlink)
        except (NetlinkError, ValueError, OSError) as error:
            os.write(report, _FAILED + str(error).encode()[: _MAX_REPORT - 1])
        else:
            os.write(report, _DONE)

    try:
        pid, report = fork(body)
    except OSError as error:
        return str(error)
    try:
        answer = os.read(report, _MAX_REPORT)
    finally:
        os.close(report)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if answer == _DONE:
        return ""
    return answer[1:].decode(errors="replace") or "the process that should do it ended"
