# SPDX-License-Identifier: Apache-2.0
"""Edge: control the kernel's IPv4 forwarding: per interface, and by routing rules and tables.

It speaks rtnetlink(7) itself: the files below /proc/sys are read-only for a service, and a library takes
25 MiB of a daemon for a few messages.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct

from millpond.linux.netlink.messages import (
    ACKNOWLEDGE,
    CREATE,
    EXCLUSIVE,
    acknowledged,
    attribute,
    message,
    nested,
    text,
)

_LINK, _RULE, _ROUTE = struct.Struct("=BxHiII"), struct.Struct("=8BI"), struct.Struct("=8BI")
_RTM_SETLINK, _RTM_NEWROUTE, _RTM_DELROUTE, _RTM_NEWRULE, _RTM_DELRULE = 19, 24, 25, 32, 33
_IFLA_AF_SPEC, _IFLA_INET_CONF, _DEVCONF_FORWARDING = 26, 1, 1
_FRA_IIFNAME, _FRA_PRIORITY, _FRA_TABLE, _FRA_IP_PROTO, _FRA_DPORT_RANGE = 3, 6, 15, 22, 24
_TO_TABLE, _PROHIBIT = 1, 8
_RTA_DST, _RTA_OIF, _RTA_TABLE = 1, 4, 15
_PROTOCOL_STATIC, _SCOPE_LINK, _UNICAST = 4, 253, 1


def set_forwarding(interface: str, *, on: bool) -> None:
    """Set whether packets that come in by an interface may go out by others. Raises OSError."""
    index = socket.if_nametoindex(interface)
    setting = attribute(_DEVCONF_FORWARDING, struct.pack("=I", on))
    for kind in (_IFLA_INET_CONF, socket.AF_INET, _IFLA_AF_SPEC):
        setting = nested(kind, setting)
    _request(_RTM_SETLINK, 0, _LINK.pack(socket.AF_UNSPEC, 0, index, 0, 0) + setting)


def prohibit(interface: str, priority: int) -> None:
    """Add a rule that refuses packets which come in by an interface and are not for this machine, unless an
    earlier rule allows them. The interface need not exist yet. Raises OSError.
    """
    _add_rule(_PROHIBIT, 0, _matching(interface, priority))


def allow_tcp(interface: str, priority: int, ports: range, table: int) -> None:
    """Add a rule that routes TCP from an interface to these ports as ``table`` says. Raises OSError."""
    match = _matching(interface, priority) + attribute(_FRA_IP_PROTO, bytes([socket.IPPROTO_TCP]))
    match += attribute(_FRA_DPORT_RANGE, struct.pack("=HH", ports.start, ports.stop - 1))
    _add_rule(_TO_TABLE, table, match)


def delete_rules(interface: str, priority: int) -> None:
    """Delete all rules for an interface at a priority. Raises OSError."""
    while _done(_RTM_DELRULE, _rule(0) + _matching(interface, priority), errno.ENOENT):
        pass


def add_route(network: ipaddress.IPv4Network, interface: str, table: int) -> None:
    """Add a route to ``table``; it goes away with the interface. Raises OSError."""
    way = attribute(_RTA_OIF, struct.pack("=I", socket.if_nametoindex(interface)))
    _request(_RTM_NEWROUTE, CREATE | EXCLUSIVE, _route(network, table) + way)


def delete_route(network: ipaddress.IPv4Network, table: int) -> None:
    """Delete a route of ``table``, if it is still there. Raises OSError."""
    _done(_RTM_DELROUTE, _route(network, table), errno.ESRCH)


def _route(network: ipaddress.IPv4Network, table: int) -> bytes:
    fields = (socket.AF_INET, network.prefixlen, 0, 0, 0, _PROTOCOL_STATIC, _SCOPE_LINK, _UNICAST)
    head = _ROUTE.pack(*fields, 0) + attribute(_RTA_DST, network.network_address.packed)
    return head + _number(_RTA_TABLE, table)


def _add_rule(action: int, table: int, match: bytes) -> None:
    body = _rule(action) + match + (_number(_FRA_TABLE, table) if table else b"")
    _request(_RTM_NEWRULE, CREATE | EXCLUSIVE, body)


def _rule(action: int) -> bytes:
    return _RULE.pack(socket.AF_INET, *bytes(6), action, 0)


def _matching(interface: str, priority: int) -> bytes:
    return text(_FRA_IIFNAME, interface) + _number(_FRA_PRIORITY, priority)


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


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
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.sendto(message(kind, ACKNOWLEDGE | flags, body), (0, 0))
        if not acknowledged(sock.recv(65536)):
            raise OSError(errno.EPROTO, "the kernel gave no answer to a routing request")
