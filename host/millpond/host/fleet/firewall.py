# SPDX-License-Identifier: Apache-2.0
"""Edge: the host's services are closed to its devices, but for worker 0 of a launch.

The kernel refuses what comes in by a tunnel's interface for the host itself: a device may answer the host's
connections, and begin none. While a launch has a worker on the host, its devices may connect to the ports
that this worker listens on, and to those that the kernel gives to sockets which name none, as
torch.distributed's do, unless another program had them when the launch began. Of a port on which the worker
has begun to listen the guard hears some 10 ms later: it drops the first packet to a closed one, so that who
connects at once meets it at the next try, a second later. Other networks and the host's
other users reach none of the worker's ports: who reaches a rendezvous of torch can run code there. The guard
outlives a reload of the machine's own rules, and a killed daemon, whose tunnels end a moment after it; the
next one replaces it.

The devices of another host, which a link brings, reach those ports of the host's worker that it listens on,
and nothing else of the host.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from millpond.base.errors import LocalError
from millpond.host.fleet import worker_user
from millpond.host.fleet.addresses import PeerLink
from millpond.host.fleet.directory import Fleet
from millpond.linux.netlink import nftables
from millpond.linux.netlink.nftables import InputGuard, PortGuard
from millpond.linux.network import listening

log = logging.getLogger(__name__)

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PRIORITY = -10
"""Before the machine's own filters, which have 0 and may drop more."""


class HostFirewall:
    """The host's guard against a fleet's devices, from before the tunnels are made until ``close``. Raises
    LocalError where the kernel has no nftables, unless the fleet does without it.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._guard: InputGuard | None = None
        interfaces = [fleet.interface(device.name) for device in fleet.config.device]
        if fleet.config.host.firewall == "off":
            with contextlib.suppress(OSError):  # of a daemon that was killed
                nftables.delete(_table(fleet))
            log.warning("devices reach the host's services: fleet.toml says host.firewall = 'off'")
            return
        try:
            self._guard = InputGuard(_table(fleet), _PRIORITY, interfaces, _ephemeral_ports())
        except OSError as error:
            raise LocalError(
                f"the host's services cannot be closed to its devices: nftables: {error.strerror or error}. "
                "Load the module nf_tables (Linux 5.12 or later), or set host.firewall = 'off' in fleet.toml"
            ) from None

    def add(self, device: str) -> None:
        """Guard against one device more, before its tunnel is made. Raises LocalError."""
        if self._guard:
            try:
                self._guard.guard(self._fleet.interface(device))
            except OSError as error:
                raise LocalError(
                    f"the host's services cannot be closed to {device}: nftables: {error.strerror or error}"
                ) from None

    @contextlib.contextmanager
    def _closed_to_strangers(self, links: Sequence[PeerLink]) -> Iterator[PortGuard]:
        trusted = ["lo", *(self._fleet.interface(device.name) for device in self._fleet.config.device)]
        users = {0, os.geteuid(), worker_user.UID}
        try:
            networks = [(link.interface, network) for link in links for network in link.networks]
            guard = PortGuard(_table(self._fleet), _PRIORITY, trusted, sorted(users), networks)
        except OSError as error:
            raise LocalError(
                f"the launch cannot be closed to other users: nftables: {error.strerror or error}"
            ) from None
        try:
            yield guard
        finally:
            guard.close()

    def close(self) -> None:
        """Remove the guard, once the tunnels are gone."""
        if self._guard:
            self._guard.close()

    @contextlib.contextmanager
    def open_to(
        self, devices: Sequence[str], *, host: bool, links: Sequence[PeerLink] = ()
    ) -> Iterator[OpenPorts]:
        """Let these devices, and those behind the ``links``, connect to the ``host``'s worker inside the
        context, if there is one, and nobody else; those behind the links reach no other port of the host.
        Yields what opens other ports. Raises LocalError.
        """
        with contextlib.ExitStack() as undo:
            closed = (host or links) and self._guard
            strangers = undo.enter_context(self._closed_to_strangers(links)) if closed else None
            opened = OpenPorts(self._guard, tuple(map(self._fleet.interface, devices)), strangers)
            undo.callback(opened.close)
            opened.open()
            yield opened


class OpenPorts:
    """The ports of a launch's worker on the host, open to its devices' ``interfaces``, and closed to
    ``strangers``: other networks, and other users of the host.
    """

    def __init__(
        self,
        guard: InputGuard | None = None,
        interfaces: Sequence[str] = (),
        strangers: PortGuard | None = None,
    ) -> None:
        self._guard, self._interfaces, self._strangers = guard, interfaces, strangers
        self._closed: set[int] = set()
        taken = set(listening().values()) if guard and interfaces else set()
        self._others = tuple(sorted(port for port in taken if port in _ephemeral_ports()))
        self._added: set[int] = set()

    def open(self) -> None:
        """Open those that the kernel gives, but no other program's of now. Raises LocalError."""
        if not self._guard:
            return
        for interface in self._interfaces:
            try:
                self._guard.open_to(interface, self._others)
            except OSError as error:
                text = f"{interface} cannot be let to the host: {error.strerror or error}"
                raise LocalError(text) from None

    def reserve(self, port: int) -> None:
        """Close the port on which the worker is to listen, before it does. Raises LocalError."""
        try:
            self._close_to_strangers({port})
        except OSError as error:
            raise LocalError(f"port {port} cannot be closed to others: {error.strerror or error}") from None

    def _close_to_strangers(self, ports: Collection[int]) -> None:
        if not self._strangers:
            return
        for port in set(ports) - self._closed:
            self._strangers.change(port, closed=True)
            self._closed.add(port)

    def listen(self, ports: Collection[int]) -> None:
        """Open the ports that the worker listens on now, and no others; to strangers each stays closed."""
        for port in self._added ^ set(ports):
            self._try(InputGuard.remove_port if port in self._added else InputGuard.add_port, port)
        self._added = set(ports)
        try:
            self._close_to_strangers(ports)
        except OSError as error:
            log.warning("ports of a launch are not closed to others: %s", error.strerror or error)

    def close(self) -> None:
        """Close all."""
        self.listen(())
        self._try(InputGuard.close_to, self._others)

    def _try(self, step: Callable[[InputGuard, str, Any], None], argument: object) -> None:
        if not self._guard:
            return
        for interface in self._interfaces:
            try:
                step(self._guard, interface, argument)
            except OSError as error:
                log.warning("ports for %s stay as they are: %s", interface, error.strerror or error)


def _table(fleet: Fleet) -> str:
    """Return the name of the guard's table: two fleets of one name on a machine have two directories."""
    status = fleet.directory.stat()
    return f"millpond-{status.st_dev:x}-{status.st_ino:x}"


def _ephemeral_ports() -> range:
    first, last = map(int, PORT_RANGE.read_text().split())
    return range(first, last + 1)
