# SPDX-License-Identifier: Apache-2.0
"""Edge: encrypted links between hosts, by the kernel's WireGuard (Linux 5.6, module wireguard).

An interface has a key of its own, which lives as long as it does. Each peer has a part of the addresses: the
kernel takes packets of these from that peer alone, and encrypts what goes to them with its key.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millpond.base.errors import LocalError
from millpond.linux.child import in_child

if TYPE_CHECKING:
    from pyroute2 import IPRoute

_KIND, _KEY_BYTES = "wireguard", 32


@dataclass(frozen=True, slots=True)
class WireGuardPeer:
    """The other end of a link: its public key in base64, where it receives, and its networks."""

    key: str
    address: str
    port: int
    networks: tuple[ipaddress.IPv4Network, ...]


class WireGuardLink:
    """An interface with a private ``key``, which receives at a UDP ``port``, until ``close``. Raises
    LocalError where the kernel has no WireGuard.
    """

    def __init__(self, interface: str, key: bytes, port: int) -> None:
        self.interface, self._key, self._port = interface, key, port
        if problem := in_child(self._make):
            raise LocalError(f"this kernel makes no WireGuard interface: {problem}")

    def _make(self, netlink: IPRoute) -> None:
        netlink.link("add", ifname=self.interface, kind=_KIND)

    def open(self, peers: Sequence[WireGuardPeer]) -> None:
        """Let these peers in, and no others, and bring the interface up. Raises LocalError."""

        def work(netlink: IPRoute) -> None:
            from pyroute2 import WireGuard

            key = base64.b64encode(self._key).decode()
            with WireGuard() as wireguard:
                wireguard.set(self.interface, listen_port=self._port, private_key=key)
                for peer in peers:
                    wireguard.set(self.interface, peer=_described(peer))
            (index,) = netlink.link_lookup(ifname=self.interface)
            netlink.link("set", index=index, state="up")

        if problem := in_child(work):
            raise LocalError(f"the WireGuard interface cannot be set up: {problem}")

    def close(self) -> None:
        """Delete the interface, and its key with it."""
        delete(self.interface)


def _described(peer: WireGuardPeer) -> dict[str, object]:
    """Return a peer in pyroute2's words."""
    return {
        "public_key": peer.key,
        "endpoint_addr": peer.address,
        "endpoint_port": peer.port,
        "replace_allowed_ips": True,
        "allowed_ips": list(map(str, peer.networks)),
    }


def delete(prefix: str) -> None:
    """Delete the interfaces whose names begin so."""

    def work(netlink: IPRoute) -> None:
        for index, name in socket.if_nameindex():
            if name.startswith(prefix):
                netlink.link("del", index=index)

    if any(name.startswith(prefix) for _, name in socket.if_nameindex()):
        in_child(work)


def check_key(text: str) -> None:
    """Raise ValueError unless ``text`` is a public key in base64."""
    if len(base64.b64decode(text, validate=True)) != _KEY_BYTES:
        raise ValueError("this is no public key of WireGuard")
