# SPDX-License-Identifier: Apache-2.0
"""Edge: forwarding between devices: none, but between the devices of one launch.

Two guards, each of which is enough: a tunnel's interface forwards nothing, and a routing rule refuses packets
that come in by it and are not for the host itself. A launch opens both for exactly its devices, and for
nothing but TCP to ports above those of agents and SSH servers. The rules are there before the interfaces, and
last longer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec

from millpond.base.errors import LocalError
from millpond.host.fleet.directory import Fleet
from millpond.linux import rtnetlink
from millpond.wire.control_messages import CONTROL_PORT

log = logging.getLogger(__name__)
P = ParamSpec("P")

PORTS = range(CONTROL_PORT + 1, 65535)
"""Ports that devices of one launch reach on each other: not agents' or SSH's. The kernel takes no 65535."""
_ALLOW, _PROHIBIT = 17700, 17701
_FIRST_TABLE = 7_700_000


class Forwarding:
    """The host's rules for a fleet's tunnels, from before the first is made until ``close``."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._interfaces = [fleet.interface(device.name) for device in fleet.config.device]
        self._lock = threading.Lock()
        self._tables: set[int] = set()
        self._problem = ""
        try:
            for interface in self._interfaces:
                _delete_rules(interface)  # a killed daemon leaves them
                rtnetlink.prohibit(interface, _PROHIBIT)
        except OSError as error:
            self._problem = f"this kernel takes no routing rules: {error.strerror}"
            log.warning("%s; launches can have one device only", self._problem)

    def close(self) -> None:
        """Remove the rules, once the tunnels are gone."""
        for interface in self._interfaces:
            _try(_delete_rules, interface)

    @contextlib.contextmanager
    def between(self, devices: Sequence[str]) -> Iterator[None]:
        """Forward TCP between these devices, and no others, inside the context. Raises LocalError."""
        if len(devices) < 2:
            yield
            return
        if self._problem:
            raise LocalError(f"devices cannot speak with each other: {self._problem}")
        with contextlib.ExitStack() as undo:
            try:
                self._open(devices, undo)
            except OSError as error:
                raise LocalError(f"devices cannot speak with each other: {error.strerror or error}") from None
            yield

    def _open(self, devices: Sequence[str], undo: contextlib.ExitStack) -> None:
        table = self._take_table()
        undo.callback(self._tables.discard, table)
        for name in devices:
            network = ipaddress.IPv4Interface(self._fleet.addresses(name).host).network
            undo.callback(_try, rtnetlink.delete_route, network, table)
            rtnetlink.add_route(network, self._fleet.interface(name), table)
        for name in devices:
            interface = self._fleet.interface(name)
            undo.callback(_try, rtnetlink.delete_rules, interface, _ALLOW)
            rtnetlink.allow_tcp(interface, _ALLOW, PORTS, table)
            undo.callback(_try, rtnetlink.set_forwarding, interface, on=False)
            rtnetlink.set_forwarding(interface, on=True)

    def _take_table(self) -> int:
        with self._lock:
            table = next(number for number in itertools.count(_FIRST_TABLE) if number not in self._tables)
            self._tables.add(table)
        return table


def _delete_rules(interface: str) -> None:
    for priority in (_ALLOW, _PROHIBIT):
        rtnetlink.delete_rules(interface, priority)


def _try(step: Callable[P, None], *arguments: P.args, **options: P.kwargs) -> None:
    """Run an undo step; ignore OSError, as rules vanish with their interface."""
    with contextlib.suppress(OSError):
        step(*arguments, **options)
