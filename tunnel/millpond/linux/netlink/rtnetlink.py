# SPDX-License-Identifier: Apache-2.0
"""Edge: control the kernel's IPv4: forwarding by interface, routing rules and tables, addresses.

It speaks rtnetlink(7) itself: the files below /proc/sys are read-only for a service, and a library takes
25 MiB of a daemon for a few messages.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from millpond.linux.netlink.messages import (
    ACKNOWLEDGE,
    CREATE,
    DONE,
    DUMP,
    ERROR,
    EXCLUSIVE,
    HEADER,
    acknowledged,
    attribute,
    attributes,
    message,
    nested,
    parts,
    text,
)

_LINK, _RULE, _ROUTE = struct.Struct("=BxHiII"), struct.Struct("=8BI"), struct.Struct("=8BI")
_ADDRESS = struct.Struct("=4BI")
_RTM_SETLINK, _RTM_NEWADDR, _RTM_NEWROUTE, _RTM_DELROUTE, _RTM_GETROUTE = 19, 20, 24, 25, 26
_RTM_NEWRULE, _RTM_DELRULE, _RTM_GETRULE = 32, 33, 34
_IFF_UP = 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFLA_AF_SPEC, _IFLA_INET_CONF, _DEVCONF_FORWARDING = 26, 1, 1
_FRA_DST, _FRA_SRC, _FRA_IIFNAME, _FRA_PRIORITY = 1, 2, 3, 6
_FRA_SUPPRESS_PREFIXLEN, _FRA_TABLE, _FRA_IP_PROTO, _FRA_DPORT_RANGE = 14, 15, 22, 24
_MAIN = 254
_TO_TABLE, _PROHIBIT = 1, 8
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_PREFSRC, _RTA_TABLE = 1, 4, 5, 6, 7, 15
_PROTOCOL_STATIC, _SCOPE_LINK, _SCOPE_UNIVERSE, _SCOPE_ANY, _UNICAST, _ONLINK = 4, 253, 0, 255, 1, 4
_ANY_TYPE, _UNREACHABLE, _LAST_METRIC = 0, 7, 1 << 31


def set_forwarding(interface: str, *, on: bool) -> None:
    """Set whether packets that come in by an interface may go out by others. Raises OSError."""
    index = socket.if_nametoindex(interface)
    setting = attribute(_DEVCONF_FORWARDING, struct.pack("=I", on))
    for kind in (_IFLA_INET_CONF, socket.AF_INET, _IFLA_AF_SPEC):
        setting = nested(kind, setting)
    _request(_RTM_SETLINK, 0, _LINK.pack(socket.AF_UNSPEC, 0, index, 0, 0) + setting)


def set_up(interface: str) -> None:
    """Bring an interface up; one that is up stays so. Raises OSError."""
    index = socket.if_nametoindex(interface)
    _request(_RTM_SETLINK, 0, _LINK.pack(socket.AF_UNSPEC, 0, index, _IFF_UP, _IFF_UP))


def add_address(interface: str, address: ipaddress.IPv4Interface) -> bool:
    """Give an interface an address. Returns whether the interface did not have it yet. Raises OSError."""
    index, length = socket.if_nametoindex(interface), address.network.prefixlen
    body = _ADDRESS.pack(socket.AF_INET, length, 0, 0, index)
    for kind in (_IFA_LOCAL, _IFA_ADDRESS):
        body += attribute(kind, address.ip.packed)
    return _added(_RTM_NEWADDR, body)


def outgoing(address: ipaddress.IPv4Address) -> str:
    """Return the interface by which packets to an address leave this machine; "" if there is none. Raises
    OSError.
    """
    return next_hop(address)[0]


def next_hop(address: ipaddress.IPv4Address) -> tuple[str, str]:
    """Return the interface by which packets to an address leave this machine, and the gateway that takes
    them; "" for each if there is none. Raises OSError.
    """
    body = _ROUTE.pack(socket.AF_INET, 32, *bytes(6), 0) + attribute(_RTA_DST, address.packed)
    try:
        answer = _ask(_RTM_GETROUTE, body)
    except OSError as error:
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES):  # the last by a rule
            return "", ""
        raise
    told = dict(attributes(answer[HEADER.size + _ROUTE.size :]))
    index, gateway = told.get(_RTA_OIF), told.get(_RTA_GATEWAY)
    interface = socket.if_indextoname(int.from_bytes(index, sys.byteorder)) if index else ""
    return interface, str(ipaddress.IPv4Address(gateway)) if gateway else ""


def prohibit(interface: str, priority: int, to: ipaddress.IPv4Network | None = None) -> bool:
    """Add a rule that refuses packets which come in by an interface and are not for this machine, or only
    those for the network ``to``, unless an earlier rule allows them. The interface need not exist yet.
    Returns whether there was no such rule. Raises OSError.
    """
    match = _matching(interface, priority) + (attribute(_FRA_DST, to.network_address.packed) if to else b"")
    return _add_rule(_PROHIBIT, 0, match, to_bits=to.prefixlen if to else 0)


def allow_tcp(
    interface: str,
    priority: int,
    ports: range,
    table: int,
    source: ipaddress.IPv4Network | None = None,
) -> bool:
    """Add a rule that routes TCP from an interface, and from the network ``source`` if there is one, to these
    ports as ``table`` says. Returns whether there was no such rule. Raises OSError.
    """
    match = _matching(interface, priority) + attribute(_FRA_IP_PROTO, bytes([socket.IPPROTO_TCP]))
    match += attribute(_FRA_DPORT_RANGE, struct.pack("=HH", ports.start, ports.stop - 1))
    if source:
        match += attribute(_FRA_SRC, source.network_address.packed)
    return _add_rule(_TO_TABLE, table, match, source.prefixlen if source else 0)


def use_table(interface: str, priority: int, table: int) -> bool:
    """Add a rule that routes what comes from an interface as ``table`` says, as far as that has a route;
    from "lo" comes what this machine sends itself. Returns whether there was no such rule. Raises OSError.
    """
    return _add_rule(_TO_TABLE, table, _matching(interface, priority))


def keep_from_default(source: ipaddress.IPv4Network, priority: int) -> bool:
    """Add rules, at this priority and the next, by which what this machine sends from addresses of ``source``
    takes routes of the main table, but no default route. Returns whether one was not there. Raises OSError.
    """
    match, bits = attribute(_FRA_SRC, source.network_address.packed), source.prefixlen
    routed = _matching("lo", priority) + match + _number(_FRA_SUPPRESS_PREFIXLEN, 0)
    found = [_add_rule(_TO_TABLE, _MAIN, routed, bits)]
    found.append(_add_rule(_PROHIBIT, 0, _matching("lo", priority + 1) + match, bits))
    return any(found)


def let_to_default(source: ipaddress.IPv4Network, priority: int) -> None:
    """Delete the rules of ``keep_from_default``. Raises OSError."""
    match = attribute(_FRA_SRC, source.network_address.packed)
    head = _RULE.pack(socket.AF_INET, 0, source.prefixlen, *bytes(6))
    for each in (priority, priority + 1):
        _done(_RTM_DELRULE, head + _matching("lo", each) + match, errno.ENOENT)


def delete_rules(interface: str, priority: int) -> None:
    """Delete all rules for an interface at a priority. Raises OSError."""
    while _done(_RTM_DELRULE, _rule(0) + _matching(interface, priority), errno.ENOENT):
        pass


def rules(priorities: range) -> list[tuple[str, int]]:
    """Return interface and priority of all rules for packets that come in by an interface, of these
    priorities. Raises OSError.
    """
    found = []
    for body in _dump(_RTM_GETRULE, _rule(0)):
        told = dict(attributes(body[_RULE.size :]))
        priority = int.from_bytes(told.get(_FRA_PRIORITY, b""), sys.byteorder)
        if _FRA_IIFNAME in told and priority in priorities:
            found.append((told[_FRA_IIFNAME].rstrip(b"\0").decode(), priority))
    return found


def add_route(
    network: ipaddress.IPv4Network,
    interface: str,
    table: int,
    gateway: ipaddress.IPv4Address | None = None,
    source: ipaddress.IPv4Address | None = None,
) -> bool:
    """Add a route to ``table``, by a ``gateway`` on the interface's link if there is one; it goes away with
    the interface. What this machine sends has the ``source`` then, if it names none. Returns whether there
    was none. Raises OSError.
    """
    way = attribute(_RTA_OIF, struct.pack("=I", socket.if_nametoindex(interface)))
    way += attribute(_RTA_GATEWAY, gateway.packed) if gateway else b""
    way += attribute(_RTA_PREFSRC, source.packed) if source else b""
    place = _route(network, table, *((_SCOPE_UNIVERSE, _ONLINK) if gateway else (_SCOPE_LINK, 0)))
    return _added(_RTM_NEWROUTE, place + way)


def add_unreachable(network: ipaddress.IPv4Network, table: int, source: ipaddress.IPv4Address) -> bool:
    """Add a route to ``table`` that refuses what goes to a network while the table has no other route there.
    It stays when interfaces go; ``source`` tells whose it is. Returns whether there was none. Raises OSError.
    """
    place = _route(network, table, _SCOPE_UNIVERSE, kind=_UNREACHABLE)
    place += attribute(_RTA_PREFSRC, source.packed) + _number(_RTA_PRIORITY, _LAST_METRIC)
    return _added(_RTM_NEWROUTE, place)


def delete_route(network: ipaddress.IPv4Network, table: int) -> None:
    """Delete the routes of ``table`` to a network that are still there. Raises OSError."""
    while _done(_RTM_DELROUTE, _route(network, table, _SCOPE_ANY, kind=_ANY_TYPE), errno.ESRCH):
        pass


@dataclass(frozen=True, slots=True)
class Route:
    """A route of a ``table`` to a ``network``, and the ``source`` of what this machine sends there."""

    table: int
    network: ipaddress.IPv4Network
    source: ipaddress.IPv4Address | None


def routes(tables: range) -> list[Route]:
    """Return the routes of these tables. Raises OSError."""
    found = []
    for body in _dump(_RTM_GETROUTE, _ROUTE.pack(socket.AF_INET, *bytes(7), 0)):
        told = dict(attributes(body[_ROUTE.size :]))
        table = int.from_bytes(told.get(_RTA_TABLE, b""), sys.byteorder)
        if table in tables:
            network = ipaddress.IPv4Network((told.get(_RTA_DST, bytes(4)), _ROUTE.unpack_from(body)[1]))
            source = told.get(_RTA_PREFSRC)
            found.append(Route(table, network, ipaddress.IPv4Address(source) if source else None))
    return found


def _route(
    network: ipaddress.IPv4Network, table: int, scope: int, flags: int = 0, kind: int = _UNICAST
) -> bytes:
    fields = (socket.AF_INET, network.prefixlen, 0, 0, 0, _PROTOCOL_STATIC, scope, kind)
    head = _ROUTE.pack(*fields, flags) + attribute(_RTA_DST, network.network_address.packed)
    return head + _number(_RTA_TABLE, table)


def _add_rule(action: int, table: int, match: bytes, source_bits: int = 0, to_bits: int = 0) -> bool:
    head = _RULE.pack(socket.AF_INET, to_bits, source_bits, *bytes(4), action, 0)
    return _added(_RTM_NEWRULE, head + match + (_number(_FRA_TABLE, table) if table else b""))


def _rule(action: int) -> bytes:
    return _RULE.pack(socket.AF_INET, *bytes(6), action, 0)


def _matching(interface: str, priority: int) -> bytes:
    return text(_FRA_IIFNAME, interface) + _number(_FRA_PRIORITY, priority)


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def _added(kind: int, body: bytes) -> bool:
    """Send an addition; returns whether it was not there yet."""
    try:
        _request(kind, CREATE | EXCLUSIVE, body)
    except FileExistsError:
        return False
    return True


def _done(kind: int, body: bytes, nothing_left: int) -> bool:
    """Send a deletion; returns whether there was something to delete."""
    try:
        _request(kind, 0, body)
    except OSError as error:
        if error.errno == nothing_left:
            return False
        raise
    return True


def _request(kind: int, flags: int, body: bytes) -> None:
    """Send one message and wait for its acknowledgement. Raises OSError."""
    if not acknowledged(_exchange(kind, ACKNOWLEDGE | flags, body)):
        raise OSError(errno.EPROTO, "the kernel gave no answer to a routing request")


def _ask(kind: int, body: bytes) -> bytes:
    """Send a question and return the answer. Raises OSError."""
    answer = _exchange(kind, 0, body)
    if len(answer) < HEADER.size or HEADER.unpack_from(answer)[1] == ERROR:
        acknowledged(answer)
    return answer


def _dump(kind: int, body: bytes) -> Iterator[bytes]:
    """Send a question and yield the bodies of all answers. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.sendto(message(kind, DUMP, body), (0, 0))
        while True:
            answer = sock.recv(65536)
            for answered, part in parts(answer):
                if answered == DONE:
                    return
                if answered == ERROR:
                    acknowledged(answer)
                yield part


def _exchange(kind: int, flags: int, body: bytes) -> bytes:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.sendto(message(kind, flags, body), (0, 0))
        return sock.recv(65536)
