# SPDX-License-Identifier: Apache-2.0
"""Edge: this host's ends of the links to the other hosts of a launch: encrypted by WireGuard, or plain."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import socket
from collections.abc import Iterator

from millpond.base.errors import ConfigError, LocalError
from millpond.host.api.launch import JoinLaunch, OtherHost
from millpond.host.fleet.addresses import PeerLink, networks_of
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.forwarding import plain_link
from millpond.linux.netlink import wireguard
from millpond.linux.netlink.wireguard import WireGuardLink, WireGuardPeer


class HostLinks:
    """The links of one launch, whose encryption is that of ``encrypted``; without it there are only ``plain``
    ones, if these are wanted.
    """

    def __init__(
        self,
        fleet: Fleet,
        encrypted: WireGuardLink | None = None,
        key: str = "",
        port: int = 0,
        *,
        plain: bool = False,
    ) -> None:
        self._fleet, self._encrypted, self._plain = fleet, encrypted, plain
        self.key, self.port = key, port
        """The public key and the UDP port to which the others send; "" and 0 without encryption."""

    def to(self, joined: JoinLaunch, first: str) -> list[PeerLink]:
        """Open the links to the other hosts, which know this one by its address for its ``first`` device.
        Raises LocalError.
        """
        source = ipaddress.IPv4Address(self._fleet.addresses(first).host_ip)
        networks = {other.name: self._networks(other) for other in joined.others}
        if not self._encrypted:
            if joined.others and not self._plain:
                raise LocalError("this host's kernel has no WireGuard, and the links are not to be plain")
            return [
                plain_link(each.name, each.address, networks[each.name], source) for each in joined.others
            ]
        self._encrypted.open([_peer(other, networks[other.name]) for other in joined.others])
        interface = self._encrypted.interface
        return [PeerLink(interface, None, networks[other.name], source) for other in joined.others]

    def _networks(self, other: OtherHost) -> tuple[ipaddress.IPv4Network, ...]:
        return networks_of(other.name, other.networks, self._fleet.peers, self._fleet.config.network)


def _peer(other: OtherHost, networks: tuple[ipaddress.IPv4Network, ...]) -> WireGuardPeer:
    try:
        wireguard.check_key(other.key)
        address = str(ipaddress.IPv4Address(other.address))
    except ValueError as error:
        raise ConfigError(f"{other.name}: {error}") from None
    return WireGuardPeer(other.key, address, other.port, networks)


@contextlib.contextmanager
def host_links(fleet: Fleet, *, plain: bool) -> Iterator[HostLinks]:
    """Yield the links of a launch, ``plain`` ones or, where the kernel can, encrypted ones. Without a key
    there can be none.
    """
    if plain:
        yield HostLinks(fleet, plain=True)
        return
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # few launches need it

    key = X25519PrivateKey.generate()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("", 0))
        port = int(free.getsockname()[1])
    try:
        made = WireGuardLink(f"{_prefix(fleet)}{port}", key.private_bytes_raw(), port)
    except LocalError:
        yield HostLinks(fleet)
        return
    with contextlib.closing(made):
        yield HostLinks(fleet, made, base64.b64encode(key.public_key().public_bytes_raw()).decode(), port)


def clear(fleet: Fleet) -> None:
    """Delete what launches of a daemon that was killed have left."""
    wireguard.delete(_prefix(fleet))


def _prefix(fleet: Fleet) -> str:
    """Return the beginning of the names of a fleet's interfaces; a name has 15 characters at most."""
    return f"mpw{fleet.directory.stat().st_ino & 0xFFFFF:x}-"
