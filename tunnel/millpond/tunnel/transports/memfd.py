# SPDX-License-Identifier: Apache-2.0
"""Edge: the transport of emulated devices: a sealed memfd and eventfds, passed over a Unix socket.

The device listens. It answers each host with ``+`` and, attached to one more byte, seven descriptors: the
region, the eventfds of the controller, those of the host; or with ``-`` and a line with the reason.
Afterwards the socket only stays open: its end means that the peer is dead.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from millpond.base.errors import ConnectionLost, LocalError, Refused
from millpond.linux import sockets
from millpond.tunnel.datapath.notifier import Notifier
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.layout import MAX_ENTRIES, MIN_ENTRIES, QUEUES, Layout
from millpond.tunnel.ring.region import Region
from millpond.tunnel.transports.ring_connection import RingConnection

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ACCEPTED, _REFUSED = b"+", b"-"
_ANSWER_TIMEOUT = 1.0
_MAX_REASON = 500


class MemfdListener:
    """The device's side: listens for hosts. Raises LocalError if it cannot listen at ``path``."""

    def __init__(self, path: Path, entries: int) -> None:
        self._layout = Layout(entries)
        self._path = path
        try:
            self._server = sockets.listen(path)
        except OSError as error:
            raise LocalError(f"cannot listen at {path}: {error.strerror}") from None
        self._server.setblocking(False)
        self._inode = path.stat().st_ino

    def readiness(self) -> int | None:
        """Return the listening socket."""
        return self._server.fileno()

    def join(self) -> RingConnection:
        """Accept a host and give it a region of its own. Raises OSError if the host has left."""
        client, _ = self._server.accept()
        with ExitStack() as undo:
            undo.callback(client.close)
            client.settimeout(_ANSWER_TIMEOUT)
            to_controller, to_host = _make_eventfds(undo), _make_eventfds(undo)
            descriptor = _make_region(self._layout.size)
            try:
                region = Region.create(_map(descriptor, self._layout.size), self._layout)
                client.sendall(_ACCEPTED)
                sockets.send_descriptors(client, [descriptor, *to_controller, *to_host])
            finally:
                os.close(descriptor)
            release = undo.pop_all().close
        notifiers = tuple(map(Notifier, to_host))
        return RingConnection("device", region, to_controller, notifiers, client.fileno(), release)

    def reject(self) -> None:
        """Reject the next host in the queue."""
        try:
            client, _ = self._server.accept()
        except OSError:
            return
        with client:
            client.setblocking(False)
            with suppress(OSError):  # it did not wait for the answer
                client.sendall(_REFUSED + b"another host is connected to this device")

    def close(self) -> None:
        """Stop listening; remove the socket unless a later endpoint has replaced it."""
        self._server.close()
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def __str__(self) -> str:
        return f"the host at {self._path}"


class MemfdConnector:
    """The host's side: connects to the device that listens at ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def readiness(self) -> int | None:
        """Return None: there is no event for a device that comes up."""
        return None

    def join(self) -> RingConnection:
        """Connect. Raises ConnectionLost, OSError, Refused, or LinkViolation for an unsafe region."""
        try:
            client = sockets.connect(self._path, _ANSWER_TIMEOUT)
        except OSError as error:
            raise ConnectionLost(f"no device answers at {self._path}: {error.strerror}") from None
        with ExitStack() as undo:
            undo.callback(client.close)
            _read_verdict(client)
            descriptors = sockets.receive_descriptors(client, 1 + 2 * QUEUES)
            for eventfd in descriptors[1:]:
                undo.callback(os.close, eventfd)
            try:
                _check_eventfds(descriptors[1:])
                memory = _map(descriptors[0], _sealed_size(descriptors[0]))
            finally:
                os.close(descriptors[0])
            to_controller, to_host = descriptors[1 : 1 + QUEUES], descriptors[1 + QUEUES :]
            region = Region.attach(memory)
            release = undo.pop_all().close
        notifiers = tuple(map(Notifier, to_controller))
        return RingConnection("host", region, tuple(to_host), notifiers, client.fileno(), release)

    def reject(self) -> None:
        """Do nothing: a host has no listener."""

    def close(self) -> None:
        """Do nothing: there is no state between connections."""

    def __str__(self) -> str:
        return f"the device at {self._path}"


def _make_eventfds(undo: ExitStack) -> tuple[int, ...]:
    eventfds = tuple(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(QUEUES))
    for eventfd in eventfds:
        undo.callback(os.close, eventfd)
    return eventfds


def _make_region(size: int) -> int:
    descriptor = os.memfd_create("millpond-tunnel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def _map(descriptor: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, size))


def _read_verdict(client: socket.socket) -> None:
    verdict = client.recv(1)
    if verdict == _ACCEPTED:
        return
    if verdict != _REFUSED:
        raise ConnectionLost("the device closed the connection before it answered")
    reason = client.recv(_MAX_REASON).decode(errors="replace")
    raise Refused("device", "busy", "".join(filter(str.isprintable, reason)))  # it goes to the log


def _sealed_size(descriptor: int) -> int:
    """Return the region's size in bytes. It is sealed, so nobody can change it: access never
    raises SIGBUS.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise LinkViolation("the device's region is not a memory file") from None
    if seals & _SEALS != _SEALS:
        raise LinkViolation("the device's region is not sealed: it could be truncated under this end")
    size = os.fstat(descriptor).st_size
    if not Layout(MIN_ENTRIES).size <= size <= Layout(MAX_ENTRIES).size:
        raise LinkViolation(f"the device's region has {size} bytes")
    return size


def _check_eventfds(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        kind = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if kind != "anon_inode:[eventfd]":  # no file has such a name: a path begins with a slash
            raise LinkViolation(f"the device passed {kind} for an eventfd")
        os.set_blocking(descriptor, False)
