# SPDX-License-Identifier: Apache-2.0
"""Edge: filter packets by nftables of the kernel (nf_tables, Linux 3.13 and later).

It speaks netlink itself, as ``rtnetlink`` does: the program ``nft`` need not be installed. Numbers in
messages are big endian (linux/netfilter/nf_tables.h).
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
import threading
from collections.abc import Collection, Sequence

from millpond.linux.netlink.messages import (
    ACKNOWLEDGE,
    APPEND,
    CREATE,
    acknowledged,
    attribute,
    message,
    nested,
    text,
)

TCP, ICMP = socket.IPPROTO_TCP, socket.IPPROTO_ICMP
ECHO_REPLY, ECHO_REQUEST = 0, 8

_FAMILY_HEADER = struct.Struct(">BBH")
_NETLINK_NETFILTER, _NFTABLES, _INET, _IPV4 = 12, 10, 1, 2
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW_TABLE, _DEL_TABLE, _NEW_CHAIN, _NEW_RULE, _NEW_SET, _NEW_ELEMENT, _DEL_ELEMENT = 0, 2, 3, 6, 9, 12, 14
_LOCAL_IN, _LOCAL_OUT, _ACCEPT, _DROP, _JUMP = 1, 3, 1, 0, -3
_IFNAME_SIZE, _IFNAME_TYPE = 16, 41
_PLACE_SIZE, _PORT_TYPE = 20, 13
_UNREACHABLE, _RESET, _ICMP_PORT = 0, 1, 3
_META_IIFNAME, _META_OIFNAME, _META_SKUID, _META_NFPROTO, _META_L4PROTO = 6, 7, 10, 15, 16
_EQUAL, _NOT_EQUAL, _AT_MOST, _AT_LEAST = 0, 1, 3, 5
_NETWORK, _TRANSPORT, _INVERTED = 1, 2, 1
_SOURCE_AT = 12
_SYN, _SYN_ORACKNOWLEDGE = b"\x02", b"\x12"
_OWNER = 2
_TIMED_OUT, _EVALUATED, _ADD = 0x10, 0x20, 0
_ATTEMPT_SIZE, _MOST_TRIED, _TRIED_MILLISECONDS = 20, 1 << 14, 5000
"""A connection's first packet is sent again after 1 s, 2 s more, and so on."""
_AT_ONCE = 1000
"""Most interfaces in one message: an attribute has less than 64 KiB."""
_SECONDS = 10.0

Message = tuple[int, int, bytes]
"""Type, flags and body of a message within a batch."""


class InputGuard:
    """Two IPv4 tables, each of which refuses what comes in by some interfaces for this machine. Thread-safe.

    They pass TCP of connections that this machine has begun, ICMP echoes, and, from interfaces that were
    opened by ``open_to``, new TCP connections to ``ports`` and to those that are added. A connection of these
    to another port is refused at its second packet, a second after the first, which is dropped: meanwhile a
    port on which a program has just begun to listen is added.

    The table ``name`` stays where this process is killed, and goes, with all others, at a reload of the
    machine's rules (nft flush ruleset). The other, ``name``-PORT, belongs to a netlink socket of this
    process, with that port (NFT_TABLE_F_OWNER, Linux 5.12): no other program can change or delete it, and the
    kernel deletes it when this process is killed.
    """

    def __init__(self, name: str, priority: int, interfaces: Sequence[str], ports: range) -> None:
        """Make the tables, in place of those of this name that were left. Raises OSError."""
        self._lock = threading.Lock()
        self._socket = _connect()
        self._lasting, self._owned = name, f"{name}-{self._socket.getsockname()[0]}"
        try:
            for table, flags in ((self._lasting, 0), (self._owned, _OWNER)):
                self._make(table, flags, priority, ports)
                for first in range(0, len(interfaces), _AT_ONCE):
                    some = interfaces[first : first + _AT_ONCE]
                    _send(self._socket, [_elements(_NEW_ELEMENT, table, "guarded", list(map(_padded, some)))])
        except BaseException:
            self.close()
            raise

    def _make(self, table: str, flags: int, priority: int, ports: range) -> None:
        try:
            _send(self._socket, _guard(table, flags, priority, ports))
        except FileNotFoundError:  # the kernel has no module to answer what it refuses
            _send(self._socket, _guard(table, flags, priority, ports, answers=False))

    def guard(self, interface: str) -> None:
        """Refuse what comes in by one interface more. Raises OSError."""
        self._change(_NEW_ELEMENT, "guarded", [_padded(interface)])

    def open_to(self, interface: str, others: Collection[int] = ()) -> None:
        """Let an interface begin connections to the ports, but for those of ``others``. Raises OSError."""
        self._change(_NEW_ELEMENT, "others", [_place(interface, port) for port in others])
        self._change(_NEW_ELEMENT, "opened", [_padded(interface)])

    def close_to(self, interface: str, others: Collection[int] = ()) -> None:
        """Undo ``open_to`` for connections to come. Raises OSError."""
        self._change(_DEL_ELEMENT, "opened", [_padded(interface)])
        self._change(_DEL_ELEMENT, "others", [_place(interface, port) for port in others])

    def add_port(self, interface: str, port: int) -> None:
        """Let an interface begin connections to one port more. Raises OSError."""
        self._change(_NEW_ELEMENT, "added", [_place(interface, port)])

    def remove_port(self, interface: str, port: int) -> None:
        """Undo ``add_port`` for connections to come. Raises OSError."""
        self._change(_DEL_ELEMENT, "added", [_place(interface, port)])

    def _change(self, kind: int, name: str, keys: Sequence[bytes]) -> None:
        with self._lock:
            for table in (self._lasting, self._owned):
                for first in range(0, len(keys), _AT_ONCE):
                    # a reload of the machine's rules has deleted the table, or the interface was not opened
                    with contextlib.suppress(FileNotFoundError):
                        _send(self._socket, [_elements(kind, table, name, keys[first : first + _AT_ONCE])])

    def close(self) -> None:
        """Delete the tables."""
        with self._lock, self._socket:
            for table in (self._lasting, self._owned):
                with contextlib.suppress(OSError):
                    _send(self._socket, _deletion(table))


class PortGuard:
    """A table that closes TCP ports of this machine, of IPv4 and IPv6, to all but what comes in by the
    ``trusted`` interfaces, or from ``networks`` by theirs, and to programs here but those of some ``users``.
    All other ports are closed to the ``networks``: they may answer this machine's connections, and send ICMP
    echoes. It belongs to a netlink socket of this process, see InputGuard. Thread-safe.
    """

    def __init__(
        self,
        name: str,
        priority: int,
        trusted: Sequence[str],
        users: Sequence[int],
        networks: Sequence[tuple[str, ipaddress.IPv4Network]] = (),
    ) -> None:
        """Make the table, with no port yet. Raises OSError."""
        self._lock = threading.Lock()
        self._socket = _connect()
        self._table = f"{name}-ports-{self._socket.getsockname()[0]}"
        try:
            self._make(priority, users, networks)
            for first in range(0, len(trusted), _AT_ONCE):
                keys = list(map(_padded, trusted[first : first + _AT_ONCE]))
                _send(self._socket, [_elements(_NEW_ELEMENT, self._table, "trusted", keys)], _INET)
        except BaseException:
            self.close()
            raise

    def _make(
        self, priority: int, users: Sequence[int], networks: Sequence[tuple[str, ipaddress.IPv4Network]]
    ) -> None:
        try:
            _send(self._socket, _port_guard(self._table, priority, users, networks), _INET)
        except FileNotFoundError:  # the kernel has no module to answer what it refuses
            _send(self._socket, _port_guard(self._table, priority, users, networks, answers=False), _INET)

    def change(self, port: int, *, closed: bool) -> None:
        """Close a port, or open it again, for connections to come. Raises OSError."""
        kind = _NEW_ELEMENT if closed else _DEL_ELEMENT
        with self._lock:
            _send(self._socket, [_elements(kind, self._table, "closed", [port.to_bytes(2)])], _INET)

    def close(self) -> None:
        """Delete the table."""
        with self._lock, self._socket, contextlib.suppress(OSError):
            _send(self._socket, _deletion(self._table), _INET)


def _port_guard(
    table: str,
    priority: int,
    users: Sequence[int],
    networks: Sequence[tuple[str, ipaddress.IPv4Network]],
    *,
    answers: bool = True,
) -> list[Message]:
    """Return the messages that make a table which closes no port yet, by two chains: of what comes in, and of
    what programs here send by the loopback interface. With ``answers`` those in ``networks`` are told of a
    refusal, at the second packet, as by InputGuard.
    """
    begins = _protocol(TCP) + _flags(_EQUAL) + _load(2, 2)
    closed = _expression("lookup", text(1, "closed") + _number(2, 1))
    begins += closed + _expression("counter", b"")
    rules = {
        "linked": [
            _protocol(TCP) + _flags(_NOT_EQUAL) + _verdict(_ACCEPT),
            _protocol(TCP) + _load(2, 2) + closed + _verdict(_ACCEPT),
            *_echoes(),
            *([_protocol(TCP) + _lookup_attempt() + _add_attempt() + _verdict(_DROP),
               _protocol(TCP) + _expression("counter", b"") + _reject(_RESET)] if answers else []),
            _expression("counter", b"") + _verdict(_DROP),
        ],
        "input": [
            _lookup("trusted") + _verdict(_ACCEPT),
            *(_from(interface, network) + _verdict(_JUMP, "linked") for interface, network in networks),
            begins + _verdict(_DROP),
        ],
        "output": [
            _meta(_META_OIFNAME) + _compare(_NOT_EQUAL, _padded("lo")) + _verdict(_ACCEPT),
            *(_meta(_META_SKUID) + _compare(_EQUAL, uid.to_bytes(4, sys.byteorder)) + _verdict(_ACCEPT)
              for uid in users),
            begins + _verdict(_DROP),
        ],
    }  # fmt: skip
    batch: list[Message] = [(_NEW_TABLE, CREATE, text(1, table) + _number(2, _OWNER))]
    batch += [_set(table, "trusted", 1), _set(table, "closed", 2, kind=_PORT_TYPE, size=2)]
    batch += [_attempts(table, 3)] if answers else []
    batch.append((_NEW_CHAIN, CREATE, text(1, table) + text(3, "linked")))
    batch += [(_NEW_RULE, CREATE | APPEND, _rule(table, rule, "linked")) for rule in rules["linked"]]
    for chain, hook in (("input", _LOCAL_IN), ("output", _LOCAL_OUT)):
        body = text(1, table) + text(3, chain) + text(7, "filter") + _number(5, _ACCEPT)
        batch.append((_NEW_CHAIN, CREATE, body + nested(4, _number(1, hook) + _number(2, priority))))
        batch += [(_NEW_RULE, CREATE | APPEND, _rule(table, rule, chain)) for rule in rules[chain]]
    return batch


def delete(name: str) -> None:
    """Delete what a process that was killed has left of its InputGuard. Raises OSError."""
    with _connect() as sock:
        _send(sock, _deletion(name))


def _guard(table: str, flags: int, priority: int, ports: range, *, answers: bool = True) -> list[Message]:
    """Return the messages that replace a table by one which guards no interface yet. With ``answers``
    the sender of what is refused is told so.
    """
    chain = text(1, table) + text(3, "input") + text(7, "filter") + _number(5, _ACCEPT)
    chain += nested(4, _number(1, _LOCAL_IN) + _number(2, priority))
    rules = [
        _lookup("guarded", inverted=True) + _verdict(_ACCEPT),
        _protocol(TCP) + _flags(_NOT_EQUAL) + _verdict(_ACCEPT),
        _protocol(TCP) + _lookup_place("added") + _verdict(_ACCEPT),
        _lookup("opened") + _protocol(TCP) + _destination(ports) + _lookup_place("others", inverted=True)
        + _verdict(_ACCEPT),
        *_echoes(),
        *([_lookup("opened") + _protocol(TCP) + _lookup_attempt() + _add_attempt() + _verdict(_DROP),
           _protocol(TCP) + _expression("counter", b"") + _reject(_RESET),
           _expression("counter", b"") + _reject(_UNREACHABLE)] if answers else []),
        _expression("counter", b"") + _verdict(_DROP),
    ]  # fmt: skip
    batch = [*_deletion(table), (_NEW_TABLE, CREATE, text(1, table) + _number(2, flags))]
    batch += [_set(table, "guarded", 1), _set(table, "opened", 2)]
    batch += [_places(table, "added", 3), _places(table, "others", 4)]
    batch += [_attempts(table, 5)] if answers else []
    batch.append((_NEW_CHAIN, CREATE, chain))
    return batch + [(_NEW_RULE, CREATE | APPEND, _rule(table, expressions)) for expressions in rules]


def _deletion(table: str) -> list[Message]:
    """Return messages that delete a table with all that it has, made first: it may not be there."""
    return [(_NEW_TABLE, CREATE, text(1, table)), (_DEL_TABLE, 0, text(1, table))]


def _set(
    table: str, name: str, number: int, *, kind: int = _IFNAME_TYPE, size: int = _IFNAME_SIZE, flags: int = 0
) -> Message:
    """Return the message that makes a set of interfaces, or of another ``kind`` of keys of a ``size``."""
    body = text(1, table) + text(2, name) + _number(3, flags) + _number(4, kind)
    return _NEW_SET, CREATE, body + _number(5, size) + _number(10, number)


def _places(table: str, name: str, number: int) -> Message:
    """Return the message that makes a set of places: an interface and a port."""
    return _set(table, name, number, kind=_IFNAME_TYPE << 6 | _PORT_TYPE, size=_PLACE_SIZE)


def _attempts(table: str, number: int) -> Message:
    """Return the message that makes the set of connections that were tried: an interface and two ports. Rules
    add to it; those that find no room are at their end.
    """
    kind = (_IFNAME_TYPE << 6 | _PORT_TYPE) << 6 | _PORT_TYPE
    bounds = nested(9, _number(1, _MOST_TRIED)) + attribute(11, _TRIED_MILLISECONDS.to_bytes(8))
    made = _set(table, "tried", number, kind=kind, size=_ATTEMPT_SIZE, flags=_EVALUATED | _TIMED_OUT)
    return *made[:2], made[2] + bounds


def _padded(interface: str) -> bytes:
    return interface.encode().ljust(_IFNAME_SIZE, b"\0")


def _place(interface: str, port: int) -> bytes:
    return (_padded(interface) + port.to_bytes(2)).ljust(_PLACE_SIZE, b"\0")


def _elements(kind: int, table: str, name: str, keys: Sequence[bytes]) -> Message:
    elements = b"".join(nested(1, nested(1, attribute(1, key))) for key in keys)
    flags = CREATE if kind == _NEW_ELEMENT else 0
    return kind, flags, text(1, table) + text(2, name) + nested(3, elements)


def _rule(table: str, expressions: bytes, chain: str = "input") -> bytes:
    return text(1, table) + text(2, chain) + nested(4, expressions)


def _lookup(name: str, *, inverted: bool = False) -> bytes:
    body = text(1, name) + _number(2, 1) + _number(5, _INVERTED if inverted else 0)
    return _meta(_META_IIFNAME) + _expression("lookup", body)


def _lookup_place(name: str, *, inverted: bool = False) -> bytes:
    """Look up the interface, in one register, and the port, in the next."""
    body = text(1, name) + _number(2, 1) + _number(5, _INVERTED if inverted else 0)
    return _meta(_META_IIFNAME) + _load(2, 2, register=2) + _expression("lookup", body)


def _attempt() -> bytes:
    """Load the interface into one register, the ports into the next."""
    return _meta(_META_IIFNAME) + _load(0, 4, register=2)


def _lookup_attempt() -> bytes:
    return _attempt() + _expression("lookup", text(1, "tried") + _number(2, 1) + _number(5, _INVERTED))


def _add_attempt() -> bytes:
    return _expression("dynset", text(1, "tried") + _number(3, _ADD) + _number(4, 1))


def _protocol(number: int) -> bytes:
    return _meta(_META_L4PROTO) + _compare(_EQUAL, bytes([number]))


def _from(interface: str, network: ipaddress.IPv4Network) -> bytes:
    """Match packets of IPv4 that come in by an interface from a network."""
    found = _meta(_META_NFPROTO) + _compare(_EQUAL, bytes([socket.AF_INET]))
    found += _meta(_META_IIFNAME) + _compare(_EQUAL, _padded(interface))
    body = _number(1, 1) + _number(2, _NETWORK) + _number(3, _SOURCE_AT) + _number(4, 4)
    found += _expression("payload", body)
    mask = nested(4, attribute(1, network.netmask.packed)) + nested(5, attribute(1, bytes(4)))
    found += _expression("bitwise", _number(1, 1) + _number(2, 1) + _number(3, 4) + mask)
    return found + _compare(_EQUAL, network.network_address.packed)


def _flags(comparison: int) -> bytes:
    """Compare TCP's SYN and ACK with those of a connection's first segment."""
    mask = nested(4, attribute(1, _SYN_ORACKNOWLEDGE)) + nested(5, attribute(1, b"\0"))
    bitwise = _number(1, 1) + _number(2, 1) + _number(3, 1) + mask
    return _load(13, 1) + _expression("bitwise", bitwise) + _compare(comparison, _SYN)


def _destination(ports: range) -> bytes:
    first, last = ports.start.to_bytes(2), (ports.stop - 1).to_bytes(2)
    return _load(2, 2) + _compare(_AT_LEAST, first) + _compare(_AT_MOST, last)


def _meta(key: int) -> bytes:
    return _expression("meta", _number(1, 1) + _number(2, key))


def _load(offset: int, size: int, *, register: int = 1) -> bytes:
    """Load bytes of the transport header into a register."""
    body = _number(1, register) + _number(2, _TRANSPORT) + _number(3, offset) + _number(4, size)
    return _expression("payload", body)


def _compare(comparison: int, value: bytes) -> bytes:
    return _expression("cmp", _number(1, 1) + _number(2, comparison) + nested(3, attribute(1, value)))


def _verdict(code: int, chain: str = "") -> bytes:
    found = _number(1, code) + (text(2, chain) if chain else b"")
    return _expression("immediate", _number(1, 0) + nested(2, nested(2, found)))


def _echoes() -> list[bytes]:
    """Return the rules that pass ICMP echoes and their replies."""
    kinds = (ECHO_REPLY, ECHO_REQUEST)
    return [
        _protocol(ICMP) + _load(0, 1) + _compare(_EQUAL, bytes([kind])) + _verdict(_ACCEPT) for kind in kinds
    ]


def _reject(kind: int) -> bytes:
    return _expression("reject", _number(1, kind) + attribute(2, bytes([_ICMP_PORT])))


def _expression(name: str, data: bytes) -> bytes:
    return nested(1, text(1, name) + nested(2, data))


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, (value & 0xFFFFFFFF).to_bytes(4))


def _message(kind: int, flags: int, family: int, resource: int, body: bytes = b"") -> bytes:
    return message(kind, flags, _FAMILY_HEADER.pack(family, 0, resource) + body)


def _connect() -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    sock.bind((0, 0))  # has the kernel choose a port that no other socket of the namespace has
    return sock


def _send(sock: socket.socket, batch: Sequence[Message], family: int = _IPV4) -> None:
    """Send messages that take effect together or not at all. Raises OSError."""
    whole = _message(_BATCH_BEGIN, 0, 0, _NFTABLES)
    for number, (kind, flags, body) in enumerate(batch, 1):
        last = ACKNOWLEDGE if number == len(batch) else 0  # errors of the others come before its answer
        whole += _message(_NFTABLES << 8 | kind, flags | last, family, 0, body)
    whole += _message(_BATCH_END, 0, 0, _NFTABLES)
    _forget_answers(sock)
    sock.settimeout(_SECONDS)
    sock.sendto(whole, (0, 0))
    acknowledged(sock.recv(1 << 16))


def _forget_answers(sock: socket.socket) -> None:
    """Drop what came behind the error of an earlier batch."""
    sock.settimeout(0)
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.recv(1 << 16)
