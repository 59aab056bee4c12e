# SPDX-License-Identifier: Apache-2.0
"""Edge: the host's services are closed to its devices, but for worker 0 of a launch.

The kernel drops what comes in by a tunnel's interface for the host itself: a device may answer the host's
connections, and begin none. While a launch has a worker on the host, its devices may connect to the ports
that the kernel gives to sockets which name none, as torch.distributed's do. The guard outlives a reload of
the machine's own rules, and a killed daemon, whose tunnels end a moment after it; the next one replaces it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.host.fleet.directory import Fleet
from millpond.linux.netlink import nftables
from millpond.linux.netlink.nftables import InputGuard

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

    def close(self) -> None:
        """Remove the guard, once the tunnels are gone."""
        if self._guard:
            self._guard.close()

    @contextlib.contextmanager
    def open_to(self, devices: Sequence[str]) -> Iterator[None]:
        """Let these devices connect to the host's worker inside the context. Raises LocalError."""
        guard = self._guard
        if guard is None:
            yield
            return
        with contextlib.ExitStack() as undo:
            for name in devices:
                interface = self._fleet.interface(name)
                undo.callback(_close_to, guard, interface)
                try:
                    guard.open_to(interface)
                except OSError as error:
                    raise LocalError(f"{name} cannot be let to the host: {error.strerror or error}") from None
            yield


def _close_to(guard: InputGuard, interface: str) -> None:
    try:
        guard.close_to(interface)
    except OSError as error:
        log.warning("%s stays open to the host's worker: %s", interface, error.strerror or error)


def _table(fleet: Fleet) -> str:
    """Return the name of the guard's table: two fleets of one name on a machine have two directories."""
    status = fleet.directory.stat()
    return f"millpond-{status.st_dev:x}-{status.st_ino:x}"


def _ephemeral_ports() -> range:
    first, last = map(int, PORT_RANGE.read_text().split())
    return range(first, last + 1)
