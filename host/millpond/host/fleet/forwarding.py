# SPDX-License-Identifier: Apache-2.0
"""Edge: forwarding between devices: none, but between the devices of one launch, or of a job that wants it.

Two guards, each of which is enough: a tunnel's interface forwards nothing, and a routing rule refuses packets
that come in by it and are not for the host itself. A launch opens both for exactly its devices, and for
nothing but TCP to ports above those of agents and SSH servers. The rules are there before the interfaces, and
last longer. A device may be in a launch and in jobs at the same time: each has rules of its own.

A launch over several hosts opens the way to another host likewise, and to nothing else behind this one: what
comes in by the link is refused before the link's interface forwards. Where that forwards already, this
machine is a router, whose other rules stay. What this host sends to devices behind a link goes by the link or
nowhere: without it the default route would take it, unencrypted.

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
from pathlib import Path
from typing import ParamSpec, TypeVar

from millpond.base.errors import ConfigError, LocalError
from millpond.host.fleet.addresses import PORTS, PeerLink
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.firewall import HostFirewall, OpenPorts
from millpond.linux.netlink import rtnetlink

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

VANISH_SECONDS = 1.0
_ALLOW, _PROHIBIT = 17700, 17701
_FIRST_TABLE = 7_700_000
_MOST = 64
"""Launches and jobs at a time, of all fleets of this machine; each has a table and priorities."""
_TABLES = range(_FIRST_TABLE, _FIRST_TABLE + _MOST)
_REFUSE = _PROHIBIT + 1
_PRIORITIES = range(_ALLOW - _MOST + 1, _REFUSE + _MOST)
_SOURCE = _REFUSE + _MOST


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


@dataclass(frozen=True, slots=True)
class _PeerWay:
    """The way between another host and the devices of one launch: routes in the table of the launch's
    ``place``, to which rules lead what that host's devices send, and what this host sends itself. Behind the
    routes are others that refuse, and behind the table is a rule that does.
    """

    link: PeerLink
    place: int

    @property
    def table(self) -> int:
        """The table of its routes."""
        return _FIRST_TABLE + self.place

    @property
    def interface(self) -> str:
        """The interface of the link."""
        return self.link.interface

    def add_route(self) -> bool:
        """Add the routes to the other host's devices. Returns whether all are new. Raises OSError."""
        for network in self.link.networks:
            rtnetlink.add_unreachable(network, self.table, self.link.source)
        place = (self.link.interface, self.table, self.link.gateway, self.link.source)
        found = [rtnetlink.add_route(network, *place) for network in self.link.networks]
        return all(found)

    def delete_route(self) -> None:
        """Delete these routes. Raises OSError."""
        for network in self.link.networks:
            rtnetlink.delete_route(network, self.table)

    def add_rule(self) -> bool:
        """Add the rules. Returns whether one was not there. Raises OSError."""
        place = (self.link.interface, _ALLOW - self.place, PORTS, self.table)
        found = [rtnetlink.prohibit("lo", _REFUSE + self.place, network) for network in self.link.networks]
        found += [rtnetlink.allow_tcp(*place, network) for network in self.link.networks]
        return any([*found, rtnetlink.use_table("lo", _ALLOW - self.place, self.table)])

    def delete_rule(self) -> None:
        """Delete the rules. Raises OSError."""
        for interface in (self.link.interface, "lo"):
            rtnetlink.delete_rules(interface, _ALLOW - self.place)
        rtnetlink.delete_rules("lo", _REFUSE + self.place)


class Forwarding:
    """The host's rules for a fleet's tunnels, from before the first is made until ``close``. Raises
    LocalError.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._firewall = fleet, HostFirewall(fleet)
        self._interfaces = [fleet.interface(device.name) for device in fleet.config.device]
        self._lock = threading.Lock()
        self._places: set[int] = set()
        self._open_ways: list[_Way | _PeerWay] = []
        self._guarded_links: set[str] = set()
        self._problem = ""
        self._network = ipaddress.IPv4Network(fleet.config.network) if fleet.config.peers else None
        _try(_close_links, fleet)
        self._prohibit(self._interfaces)

    def _prohibit(self, interfaces: Sequence[str]) -> None:
        """Let devices at these interfaces reach nothing behind the host."""
        foreign = _still_there(interfaces)
        try:
            _delete_rules(set(interfaces) - foreign)  # a killed daemon leaves them
            for interface in interfaces:
                rtnetlink.prohibit(interface, _PROHIBIT)
            self._keep_sockets()
        except OSError as error:
            self._problem = f"this kernel takes no routing rules: {error.strerror}"
            log.warning("%s; launches can have one device only", self._problem)

    def _keep_sockets(self) -> bool:
        """Have sockets at the tunnels' addresses send by the tunnels and links alone: one that a launch over
        hosts has left would send again by the default route, in clear. Returns whether that is new. Raises
        OSError.
        """
        return self._network is not None and rtnetlink.keep_from_default(self._network, _SOURCE)

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
        if self._network:
            _try(rtnetlink.let_to_default, self._network, _SOURCE)
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
            restored |= {name for name in self._guarded_links if _try(rtnetlink.prohibit, name, _PROHIBIT)}
            restored |= {"lo"} if _try(self._keep_sockets) else set()
            for way in self._open_ways:
                _try(way.add_route)  # it went with the interface, if the tunnel was made anew
            for interface in (*map(self._fleet.interface, made), *self._guarded_links):
                _try(rtnetlink.set_forwarding, interface, on=self._is_used(interface))
        if restored:
            names = ", ".join(sorted(restored))
            log.warning("another program had deleted routing rules of %s: they are back", names)

    @contextlib.contextmanager
    def between(
        self, devices: Sequence[str], *, host: bool = False, links: Sequence[PeerLink] = ()
    ) -> Iterator[OpenPorts]:
        """Forward TCP between these devices and those behind the ``links``, and no others, inside the
        context. With ``host`` they may connect to the host's worker too, at the ports that are yielded.
        Raises LocalError.
        """
        with contextlib.ExitStack() as undo:
            opened = undo.enter_context(
                self._firewall.open_to(devices if host else (), host=host, links=links)
            )
            if len(devices) >= 2 or links:
                self._open_between(devices, links, undo)
            yield opened

    def _open_between(
        self, devices: Sequence[str], links: Sequence[PeerLink], undo: contextlib.ExitStack
    ) -> None:
        if self._problem:
            raise LocalError(f"devices cannot speak with each other: {self._problem}")
        try:
            self._open(devices, links, undo)
        except OSError as error:
            raise LocalError(f"devices cannot speak with each other: {error.strerror or error}") from None

    def _open(self, devices: Sequence[str], links: Sequence[PeerLink], undo: contextlib.ExitStack) -> None:
        place = self._take_place()
        undo.callback(self._places.discard, place)
        ways: list[_Way | _PeerWay] = [self._way(name, place) for name in devices]
        ways += [_PeerWay(link, place) for link in links]
        for way in ways:
            undo.callback(_try, way.delete_route)
            if not way.add_route():  # what is there may lead elsewhere
                raise OSError(errno.EEXIST, f"routing table {way.table} has such a route already")
        for way in ways:
            undo.callback(_try, way.delete_rule)
            way.add_rule()
            undo.callback(_try, self._use, way, -1)
            self._use(way, 1)

    def _way(self, name: str, place: int) -> _Way:
        network = ipaddress.IPv4Interface(self._fleet.addresses(name).host).network
        return _Way(self._fleet.interface(name), network, _FIRST_TABLE + place, _ALLOW - place)

    def _use(self, way: _Way | _PeerWay, change: int) -> None:
        """Note one use more or less of an interface, which forwards as long as it has any. Raises OSError."""
        with self._lock:
            if change > 0:
                self._open_ways.append(way)
            else:
                self._open_ways.remove(way)
            if isinstance(way, _PeerWay):
                self._use_link(way.interface)
            else:
                rtnetlink.set_forwarding(way.interface, on=self._is_used(way.interface))

    def _use_link(self, interface: str) -> None:
        """Have a link's interface forward while it is used, but nothing that no rule allows; one that
        forwards already stays as it is. Raises OSError.
        """
        if self._is_used(interface):
            if interface not in self._guarded_links and not _is_forwarding(interface):
                self._guarded_links.add(interface)
                rtnetlink.prohibit(interface, _PROHIBIT)
                rtnetlink.set_forwarding(interface, on=True)
        elif interface in self._guarded_links:
            self._guarded_links.remove(interface)
            _close_link(interface)

    def _is_used(self, interface: str) -> bool:
        return any(way.interface == interface for way in self._open_ways)

    def _take_place(self) -> int:
        """Take a place that nothing of another fleet, or of one that was killed, uses. Raises OSError."""
        with self._lock:
            taken = self._places | {route.table - _FIRST_TABLE for route in rtnetlink.routes(_TABLES)}
            taken |= {_place_of(priority) for _, priority in rtnetlink.rules(_PRIORITIES)}
            for place in range(_MOST):
                if place not in taken:
                    self._places.add(place)
                    return place
        raise OSError(errno.EAGAIN, f"{_MOST} launches and jobs have such devices already")


def plain_link(
    host: str, address: str, networks: tuple[ipaddress.IPv4Network, ...], source: ipaddress.IPv4Address
) -> PeerLink:
    """Return the link to a host on the same network, without encryption. Raises ConfigError for what is no
    address, LocalError for one that is behind a router or nowhere.
    """
    try:
        gateway = ipaddress.IPv4Address(address)
        interface, router = rtnetlink.next_hop(gateway)
    except ValueError as error:
        raise ConfigError(f"{host}: {error}") from None
    except OSError as error:
        raise LocalError(f"{host}: no way to {address}: {error.strerror}") from None
    if not interface or interface == "lo":
        raise LocalError(f"{host}: {address} is on no network of this host")
    if router:
        raise LocalError(f"{host}: {address} is behind the router {router}: plain links are on one network")
    return PeerLink(interface, gateway, networks, source)


def _is_forwarding(interface: str) -> bool:
    """Return whether packets that come in by an interface may go out by others."""
    return Path(f"/proc/sys/net/ipv4/conf/{interface}/forwarding").read_text().strip() == "1"


def _delete_rules(interfaces: Collection[str]) -> None:
    """Delete the rules for these interfaces, found by one look at all: a fleet may have thousands."""
    for interface, priority in rtnetlink.rules(_PRIORITIES):
        if interface in interfaces:
            rtnetlink.delete_rules(interface, priority)


def _close_links(fleet: Fleet) -> None:
    """Close the links to other hosts that a killed daemon of this fleet has left open: its address is the
    source of their routes. Those of other fleets stay. Raises OSError.
    """
    own, found = ipaddress.ip_network(fleet.config.network), rtnetlink.routes(_TABLES)
    tables = {route.table for route in found if route.source and route.source in own}
    places, closed = {table - _FIRST_TABLE for table in tables}, set[str]()
    for interface, priority in rtnetlink.rules(_PRIORITIES):
        if _place_of(priority) in places:
            rtnetlink.delete_rules(interface, priority)
            closed.add(interface)
    for route in found:
        if route.table in tables:
            rtnetlink.delete_route(route.network, route.table)
    left = rtnetlink.rules(_PRIORITIES)
    used = {interface for interface, priority in left if priority != _PROHIBIT}
    for interface, priority in left:
        if priority == _PROHIBIT and interface in closed - used and not interface.startswith("mp-"):
            _close_link(interface)


def _place_of(priority: int) -> int:
    """Return the place of a rule of this priority; -1 for one of no launch or job."""
    return priority - _REFUSE if priority >= _REFUSE else _ALLOW - priority


def _close_link(interface: str) -> None:
    if interface in {name for _, name in socket.if_nameindex()}:
        rtnetlink.set_forwarding(interface, on=False)
    rtnetlink.delete_rules(interface, _PROHIBIT)


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
