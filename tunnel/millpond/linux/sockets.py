# SPDX-License-Identifier: Apache-2.0
"""Edge: use Unix sockets at paths of any length, pass descriptors over them, and enlarge buffers."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

F = TypeVar("F", int, socket.socket)
log = logging.getLogger(__name__)
QUESTION, ANSWER = b"?", b"!"
"""Whether the process at the other end of ``passed_connections`` still runs, and that it does."""
_INT = struct.Struct("i")
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # that Python does not name


def set_buffers(sock: socket.socket, receive: int, send: int) -> None:
    """Ask for socket buffers of so many bytes; without CAP_NET_ADMIN the kernel gives what net.core.rmem_max
    and wmem_max allow.
    """
    for option, forced, size in (
        (socket.SO_RCVBUF, _SO_RCVBUFFORCE, receive),
        (socket.SO_SNDBUF, _SO_SNDBUFFORCE, send),
    ):
        sock.setsockopt(socket.SOL_SOCKET, option, size)
        with contextlib.suppress(PermissionError):
            sock.setsockopt(socket.SOL_SOCKET, forced, size)


def listen(path: Path, *, mode: int = 0o600, group: int | None = None, backlog: int = 64) -> socket.socket:
    """Return a listening stream socket at ``path``; it replaces a socket that a dead server left there. The
    file has this ``mode``, and the ``group`` of this gid if that is given.

    Raises OSError, EADDRINUSE when a server still listens there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        if _is_served(path):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), str(path))
        path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _at(path, server.bind)
        if group is not None:
            os.chown(path, -1, group)
        path.chmod(mode)  # before it listens: until then nobody can connect
        server.listen(backlog)
    except OSError:
        server.close()
        raise
    return server


def readable(files: Sequence[F], seconds: float | None = None) -> list[F]:
    """Wait ``seconds`` long, or until some of ``files`` can be read, have ended, or are broken; returns
    those. Unlike select(2) it takes descriptors of any number.
    """
    poll, numbers = select.poll(), dict[int, F]()
    for file in files:
        numbers[number := file if isinstance(file, int) else file.fileno()] = file
        poll.register(number, select.POLLIN)
    return [numbers[number] for number, _ in poll.poll(None if seconds is None else 1000 * seconds)]


def free_port(address: str = "") -> int:
    """Return a TCP port that is free now at an address of this machine, without one at all of them."""
    with socket.socket() as sock:
        sock.bind((address, 0))
        port: int = sock.getsockname()[1]
    return port


def has_left(sock: socket.socket) -> bool:
    """Return whether the process at the other end has closed its connection, or its half of it."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def peer_uid(sock: socket.socket) -> int:
    """Return the uid of the process at the other end of a Unix socket, as the kernel saw it when that process
    connected. Raises OSError.
    """
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def peer_pid(sock: socket.socket) -> int:
    """Return the pid of the process at the other end of a Unix socket: of a server, when it began to listen.
    0 for one that this process cannot see. Raises OSError.
    """
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[0])


def _is_served(path: Path) -> bool:
    try:
        connect(path, timeout=1.0).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except TimeoutError:  # its backlog is full
        return True
    return True


def connect(path: Path, timeout: float | None = None) -> socket.socket:
    """Return a stream socket connected to the server at ``path``. Raises OSError."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(timeout)
    try:
        _at(path, client.connect)
    except OSError:
        client.close()
        raise
    return client


def _at(path: Path, call: Callable[[str], None]) -> None:
    """Call ``call`` with an address of ``path`` that fits the 107 bytes of sockaddr_un, however deep the path
    is.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def send_descriptors(sock: socket.socket, descriptors: list[int]) -> None:
    """Pass open descriptors to the peer, with one byte to carry them."""
    socket.send_fds(sock, [b"D"], descriptors)


def receive_descriptors(sock: socket.socket, count: int) -> list[int]:
    """Receive exactly ``count`` descriptors from the peer. Raises ConnectionError for anything else."""
    # Not socket.recv_fds: it drops its flags, and the descriptors would leak into every program started.
    data = bytearray(1)
    _, descriptors = receive_with_descriptors(sock, data, count)
    if data != b"D" or len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionError(f"expected {count} descriptors, got {len(descriptors)}")
    return descriptors


def passed_connections(sock: socket.socket) -> Iterator[socket.socket]:
    """Yield each connection that the peer passes, until it closes its end; its questions whether this process
    still runs are answered. A connection for which there is no descriptor here is lost.
    """
    data = bytearray(1)
    with contextlib.suppress(ConnectionError):
        while True:
            size, descriptors = receive_with_descriptors(sock, data, 1)
            if not size:
                return
            if data == QUESTION:
                sock.sendall(ANSWER)
            elif descriptors:
                yield socket.socket(fileno=descriptors[0])
            else:
                log.warning("a connection is lost: %s", os.strerror(errno.EMFILE))


def serve_in_thread(connection: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Serve a connection in a thread of its own; it is closed if none can be started."""
    try:
        threading.Thread(target=serve, args=(connection,), daemon=True).start()
    except RuntimeError as error:
        log.warning("a connection is lost: %s", error)
        connection.close()


def serve_passed(sock: socket.socket, most: int, serve: Callable[[socket.socket], None]) -> None:
    """Serve each connection that the peer passes, in a thread of its own, until the peer closes its end; with
    ``most`` in use, one more is refused.
    """
    places = threading.BoundedSemaphore(most)

    def serve_one(connection: socket.socket) -> None:
        with connection:
            if not places.acquire(blocking=False):
                log.warning("connection refused: %d are in use", most)
                return
            try:
                serve(connection)
            finally:
                places.release()

    for connection in passed_connections(sock):
        serve_in_thread(connection, serve_one)


def receive_with_descriptors(sock: socket.socket, into: bytearray, most: int) -> tuple[int, list[int]]:
    """Receive into a buffer. Returns the number of bytes and the descriptors that came with them, none if
    there were more than ``most``.
    """
    space = socket.CMSG_LEN(most * _INT.size)
    size, ancillary, flags, _ = sock.recvmsg_into([into], space, socket.MSG_CMSG_CLOEXEC)
    descriptors = [
        number
        for level, kind, packed in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (number,) in _INT.iter_unpack(packed[: len(packed) // _INT.size * _INT.size])
    ]
    if flags & socket.MSG_CTRUNC:
        while descriptors:
            os.close(descriptors.pop())
    return size, descriptors
