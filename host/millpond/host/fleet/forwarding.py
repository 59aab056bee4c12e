# SPDX-License-Identifier: Apache-2.0
"""Edge: forwarding between devices: none, but between the devices of one launch, or of a job that wants it.

Two guards, each of which is enough: a tunnel's interface forwards nothing, and a routing rule refuses packets
that come in by it and are not for the host itself. A launch opens both for exactly its devices, and for
nothing but TCP to ports above those of agents and SSH servers. The rules are there before the interfaces, and
last longer. A device may be in a launch and in jobs at the same time: each has rules of its own.

Other programs change what they did not make: systemd-networkd deletes foreign rules when it starts, and
ip_forward, switched on, sets the flag of each interface. ``mend`` puts back what is missing. The rules of
an interface that another program has, such as the daemon of a second fleet with a device of this name, stay.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from millpond.base.errors import LocalError
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.firewall import HostFirewall, OpenPorts
from millpond.linux.netlink import rtnetlink
from millpond.wire.control_messages import CONTROL_PORT

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

PORTS = range(CONTROL_PORT + 1, 65535)
"""Ports that devices of one launch reach on each other: not agents' or SSH's. The kernel takes no 65535."""
VANISH_SECONDS = 1.0
_ALLOW, _PROHIBIT = 17700, 17701
_FIRST_TABLE = 7_700_000
_MOST = 64
"""Launches and jobs at a time; each has a table and a priority."""


@dataclass(frozen=True, slots=True)
class _Way:
    """The way between one device and the others of a launch or job: a route to the device's ``network``, in a
    table that they share, and a rule that sends the device's TCP by this table.
    """

    interface: str
    network: ipaddress.IPv4Network
    table: int
    priority: int

    def add_route(self) -> bool:
        return rtnetlink.add_route(self.network, self.interface, self.table)

    def delete_route(self) -> None:
        rtnetlink.delete_route(self.network, self.table)

    def add_rule(self) -> bool:
        return rtnetlink.allow_tcp(self.interface, self.priority, PORTS, self.table)

    def delete_rule(self) -> None:
        rtnetlink.delete_rules(self.interface, self.priority)


class Forwarding:
    """The host's rules for a fleet's tunnels, from before the first is made until ``close``. Raises
    LocalError.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._firewall = fleet, HostFirewall(fleet)
        self._interfaces = [fleet.interface(device.name) for device in fleet.config.device]
        self._lock = threading.Lock()
        self._places: set[int] = set()
        self._open_ways: list[_Way] = []
        self._problem = ""
        self._prohibit(self._interfaces)

    def _prohibit(self, interfaces: Sequence[str]) -> None:
        """Let devices at these interfaces reach nothing behind the host."""
        foreign = _still_there(interfaces)
        try:
            _delete_rules(set(interfaces) - foreign)  # a killed daemon leaves them
            for interface in interfaces:
                rtnetlink.prohibit(interface, _PROHIBIT)
        except OSError as error:
            self._problem = f"this kernel takes no routing rules: {error.strerror}"
            log.warning("%s; launches can have one device only", self._problem)

    def add(self, device: str) -> None:
        """Make the rules for one device more, before its tunnel is made. Raises LocalError."""
        interface = self._fleet.interface(device)
        self._firewall.add(device)
        with self._lock:
            self._prohibit([interface])
            if interface not in self._interfaces:
                self._interfaces.append(interface)

    def close(self) -> None:
        """Remove the rules, once the tunnels are gone."""
        foreign = _still_there(self._interfaces)
        _try(_delete_rules, set(self._interfaces) - foreign)
        self._firewall.close()

    def mend(self, made: Collection[str]) -> None:
        """Put back the rules and routes that another program has taken away, and tell it; also the flags of
        interfaces, of devices whose tunnel this daemon has ``made``.
        """
        if self._problem:
            return
        with self._lock:
            restored = {name for name in self._interfaces if _try(rtnetlink.prohibit, name, _PROHIBIT)}
            restored |= {way.interface for way in self._open_ways if _try(way.add_rule)}
            for way in self._open_ways:
                _try(way.add_route)  # it went with the interface, if the tunnel was made anew
            for interface in map(self._fleet.interface, made):
                _try(rtnetlink.set_forwarding, interface, on=self._is_used(interface))
        if restored:
            names = ", ".join(sorted(restored))
            log.warning("another program had deleted routing rules of %s: they are back", names)

    @contextlib.contextmanager
    def between(self, devices: Sequence[str], *, host: bool = False) -> Iterator[OpenPorts]:
        """Forward TCP between these devices, and no others, inside the context. With ``host`` they may
        connect to the host's worker too, at the ports that are yielded. Raises LocalError.
        """
        with contextlib.ExitStack() as undo:
            opened = undo.enter_context(self._firewall.open_to(devices if host else (), host=host))
            if len(devices) >= 2:
                self._open_between(devices, undo)
            yield opened

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
        ways = [self._way(name, place) for name in devices]
        for way in ways:
            undo.callback(_try, way.delete_route)
            way.add_route()
        for way in ways:
            undo.callback(_try, way.delete_rule)
            way.add_rule()
            undo.callback(_try, self._use, way, -1)
            self._use(way, 1)

    def _way(self, name: str, place: int) -> _Way:
        network = ipaddress.IPv4Interface(self._fleet.addresses(name).host).network
        return _Way(self._fleet.interface(name), network, _FIRST_TABLE + place, _ALLOW - place)

    def _use(self, way: _Way, change: int) -> None:
        """Note one use more or less of an interface, which forwards as long as it has any. Raises OSError."""
        with self._lock:
            if change > 0:
                self._open_ways.append(way)
            else:
                self._open_ways.remove(way)
            rtnetlink.set_forwarding(way.interface, on=self._is_used(way.interface))

    def _is_used(self, interface: str) -> bool:
        return any(way.interface == interface for way in self._open_ways)

    def _take_place(self) -> int:
        with self._lock:
            for place in range(_MOST):
                if place not in self._places:
                    self._places.add(place)
                    return place
        raise OSError(errno.EAGAIN, f"{_MOST} launches and jobs have such devices already")


def _delete_rules(interfaces: Collection[str]) -> None:
    """Delete the rules for these interfaces, found by one look at all: a fleet may have thousands."""
    for interface, priority in rtnetlink.rules(range(_ALLOW - _MOST + 1, _PROHIBIT + 1)):
        if interface in interfaces:
            rtnetlink.delete_rules(interface, priority)


def _still_there(interfaces: Sequence[str]) -> set[str]:
    """Return those of the interfaces that exist. The tunnels of a daemon that was killed, and those that are
    being closed, end in some ms: an interface that stays belongs to another program.
    """
    end = time.monotonic() + VANISH_SECONDS
    while found := set(interfaces) & {name for _, name in socket.if_nameindex()}:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return found


def _try(step: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T | None:
    """Take a step to undo or to mend; ignore OSError, as rules vanish with their interface."""
    try:
        return step(*arguments, **options)
    except OSError:
        return None
