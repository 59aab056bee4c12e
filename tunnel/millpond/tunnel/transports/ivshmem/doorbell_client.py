# SPDX-License-Identifier: Apache-2.0
"""Edge: connect to the doorbell server as the host's endpoint, or as a device's outside of any virtual
machine.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from millpond.base.errors import ConnectionLost, ProtocolError, Refused
from millpond.linux import sockets
from millpond.tunnel.datapath.notifier import Notifier
from millpond.tunnel.ring.barrier import WEAKLY_ORDERED
from millpond.tunnel.ring.layout import MAX_ENTRIES, MIN_ENTRIES, QUEUES, Layout
from millpond.tunnel.transports.ivshmem.doorbell_server import SEALS
from millpond.tunnel.transports.ivshmem.server_protocol import NUMBER, Roster, ServerMessage

_ANSWER_TIMEOUT = 1.0
_LOCKED_BYTE = {"host": 0, "device": 1}
_FLOCK = struct.Struct("hh4xqqi4x")  # struct flock: type, whence, start, length, process


class DoorbellClient:
    """A client of the server at ``path``, for an endpoint of ``role``; an IvshmemDevice.

    Raises ConnectionLost or OSError if there is no server, ProtocolError if it breaks the protocol, Refused
    if another endpoint has that role.
    """

    def __init__(self, path: Path, role: str) -> None:
        self._undo = ExitStack()
        self._roster = Roster(QUEUES)
        self.lost, self.weakly_ordered = False, WEAKLY_ORDERED
        try:
            self._socket = self._undo.enter_context(sockets.connect(path, _ANSWER_TIMEOUT))
        except OSError as error:
            raise ConnectionLost(f"no doorbell server answers at {path}: {error.strerror}") from None
        try:
            self._introduce()
            self.memory = self._claim(role)
        except BaseException:
            self.close()
            raise
        self._socket.setblocking(False)
        self.events: tuple[int, ...] = (self._socket.fileno(),)

    def _introduce(self) -> None:
        while not self._roster.complete:
            if not self._take():
                raise ConnectionLost("the doorbell server closed the connection at once")
        if self._roster.position is None:
            raise ProtocolError("the doorbell server gave this client no ID")
        self.position, self.wakes = self._roster.position, tuple(self._roster.wakes)
        _check_eventfds(self.wakes)

    def _claim(self, role: str) -> memoryview:
        """Map the memory; lock it for the role through a descriptor of its own, which pumps keep open too.

        The lock is not on the mapped descriptor: a mapping would keep it until its last view is gone.
        """
        assert self._roster.memory is not None
        size = _sealed_size(self._roster.memory)
        own = os.open(f"/proc/self/fd/{self._roster.memory}", os.O_RDWR | os.O_CLOEXEC)
        self._undo.callback(os.close, own)
        try:
            byte = _LOCKED_BYTE[role]
            fcntl.fcntl(own, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        except BlockingIOError:
            other = "device" if role == "host" else "host"
            raise Refused(other, "busy", f"another {role} is connected to this {other}") from None
        return memoryview(mmap.mmap(self._roster.memory, size))

    def notifiers(self, peer: int) -> tuple[Notifier, ...] | None:
        """Return notifiers over the peer's eventfds; None if the peer is not there."""
        vectors = self._roster.peers.get(peer)
        return None if vectors is None else tuple(map(Notifier, vectors))

    def refresh(self) -> None:
        """Process the server's messages. The server's end does no harm to a link: the eventfds outlive it."""
        try:
            while not self.lost and self._take():
                pass
        except BlockingIOError:
            pass
        except (OSError, ProtocolError):
            self._lose()

    def _take(self) -> bool:
        """Process one message; False when there are no more to come. Raises OSError, ProtocolError."""
        message = _receive(self._socket)
        if message is None:
            self._lose()
            return False
        try:
            self._roster.take(message)
        finally:
            while self._roster.unused:
                os.close(self._roster.unused.pop())
        return True

    def _lose(self) -> None:
        self.lost, self.events = True, ()

    def close(self) -> None:
        """Leave the server; the mapping goes with its last user."""
        for descriptor in self._roster.release():
            os.close(descriptor)
        self._undo.close()


def _receive(sock: socket.socket) -> ServerMessage | None:
    """Return the next message; None when the server is gone. Raises OSError, ProtocolError."""
    # Not socket.recv_fds: it drops its flags, and the descriptors would leak into every program started.
    space = socket.CMSG_LEN(4)
    data, ancillary, flags, _ = sock.recvmsg(NUMBER.size, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = [
        struct.unpack("i", packed[:4])[0]
        for level, kind, packed in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(packed) >= 4
    ]
    if not data:
        return None
    if len(data) != NUMBER.size or flags & socket.MSG_CTRUNC:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError("the doorbell server sent a part of a message, or more than one descriptor")
    return ServerMessage(NUMBER.unpack(data)[0], descriptors[0] if descriptors else None)


def _sealed_size(descriptor: int) -> int:
    """Return the memory's size in bytes. It is sealed, so nobody can change it: access never
    raises SIGBUS.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError("the doorbell server's memory is not a memory file") from None
    if seals & SEALS != SEALS:
        raise ProtocolError(
            "the doorbell server's memory is not sealed: it could be truncated under this end"
        )
    size = os.fstat(descriptor).st_size
    if not Layout(MIN_ENTRIES).size <= size <= 2 * Layout(MAX_ENTRIES).size:
        raise ProtocolError(f"the doorbell server's memory has {size} bytes")
    return size


def _check_eventfds(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            if Path(f"/proc/self/fd/{descriptor}").readlink().name.endswith("[eventfd]"):
                os.set_blocking(descriptor, False)
                continue
        raise ProtocolError("the doorbell server passed something else for an eventfd")
