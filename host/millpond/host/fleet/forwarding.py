# SPDX-License-Identifier: Apache-2.0
"""Edge: forwarding between devices: none, but between the devices of one launch, or of a job that wants it.

Two guards, each of which is enough: a tunnel's interface forwards nothing, and a routing rule refuses packets
that come in by it and are not for the host itself. A launch opens both for exactly its devices, and for
nothing but TCP to ports above those of agents and SSH servers. The rules are there before the interfaces, and
last longer. A device may be in a launch and in jobs at the same time: each has rules of its own.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec

from millpond.base.errors import LocalError
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.firewall import HostFirewall
from millpond.linux.netlink import rtnetlink
from millpond.wire.control_messages import CONTROL_PORT

log = logging.getLogger(__name__)
P = ParamSpec("P")

PORTS = range(CONTROL_PORT + 1, 65535)
"""Ports that devices of one launch reach on each other: not agents' or SSH's. The kernel takes no 65535."""
_ALLOW, _PROHIBIT = 17700, 17701
_FIRST_TABLE = 7_700_000
_MOST = 64
"""Launches and jobs at a time; each has a table and a priority."""


class Forwarding:
    """The host's rules for a fleet's tunnels, from before the first is made until ``close``. Raises
    LocalError.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._firewall = fleet, HostFirewall(fleet)
        self._interfaces = [fleet.interface(device.name) for device in fleet.config.device]
        self._lock = threading.Lock()
        self._places: set[int] = set()
        self._uses: Counter[str] = Counter()
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
        self._firewall.close()

    @contextlib.contextmanager
    def between(self, devices: Sequence[str], *, host: bool = False) -> Iterator[None]:
        """Forward TCP between these devices, and no others, inside the context. With ``host`` they may
        connect to the host's worker too. Raises LocalError.
        """
        with contextlib.ExitStack() as undo:
            if host:
                undo.enter_context(self._firewall.open_to(devices))
            if len(devices) >= 2:
                self._open_between(devices, undo)
            yield

    def _open_between(self, devices: Sequence[str], undo: contextlib.ExitStack) -> None:
        if self._problem:
            raise LocalError(f"devices cannot speak with each other: {self._problem}")
        try:
            self._open(devices, undo)
        except OSError as error:
            raise LocalError(f"devices cannot speak with each other: {error.strerror or error}") from None

    def _open(self, devices: Sequence[str], undo: contextlib.ExitStack) -> None:
        place = self._take_place()
        undo.callback(self._places.discard, place)
        table, priority = _FIRST_TABLE + place, _ALLOW - place
        for name in devices:
            network = ipaddress.IPv4Interface(self._fleet.addresses(name).host).network
            undo.callback(_try, rtnetlink.delete_route, network, table)
            rtnetlink.add_route(network, self._fleet.interface(name), table)
        for name in devices:
            interface = self._fleet.interface(name)
            undo.callback(_try, rtnetlink.delete_rules, interface, priority)
            rtnetlink.allow_tcp(interface, priority, PORTS, table)
            undo.callback(_try, self._use, interface, -1)
            self._use(interface, 1)

    def _use(self, interface: str, change: int) -> None:
        """Note one use more or less of an interface, which forwards as long as it has any. Raises OSError."""
        with self._lock:
            self._uses[interface] += change
            rtnetlink.set_forwarding(interface, on=self._uses[interface] > 0)

    def _take_place(self) -> int:
        with self._lock:
            for place in range(_MOST):
                if place not in self._places:
                    self._places.add(place)
                    return place
        raise OSError(errno.EAGAIN, f"{_MOST} launches and jobs have such devices already")


def _delete_rules(interface: str) -> None:
    for priority in range(_ALLOW - _MOST + 1, _PROHIBIT + 1):
        rtnetlink.delete_rules(interface, priority)


def _try(step: Callable[P, None], *arguments: P.args, **options: P.kwargs) -> None:
    """Run an undo step; ignore OSError, as rules vanish with their interface."""
    with contextlib.suppress(OSError):
        step(*arguments, **options)
