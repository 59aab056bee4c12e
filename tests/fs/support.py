"""What tests of the volume share: a server in this process, and a connection that is cut when it is told."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from millpond.fs.operations import Operations
from millpond.fs.server import serve
from millpond.fs.sessions import Sessions
from millpond.wire.channel import Channel
from millpond.wire.deadline import Deadline
from millpond.wire.errors import ConnectionLost, RemoteError
from millpond.wire.message import Message

SOON = 5.0


def errno_of(call: Callable[..., object], *arguments: object, **more: object) -> int | None:
    """The errno that a call fails with; None if it succeeds."""
    try:
        call(*arguments, **more)
    except OSError as error:
        return error.errno
    return None


class Cutting(Channel):
    """A channel that cuts its connection before or after the request whose name it is told."""

    cut_before: str | None = None
    cut_after: str | None = None
    cut_after_that: str | None = None
    lose: str | None = None
    then: Callable[[], None] = staticmethod(lambda: None)

    def send(
        self, message: Message, deadline: Deadline, payload: bytes | bytearray | memoryview = b""
    ) -> None:
        if self.cut_before == message.NAME:
            self.sock.shutdown(socket.SHUT_RDWR)
            raise ConnectionLost("cut before it was sent")
        if self.lose == message.NAME:
            Cutting.lose = None
            self.sock.shutdown(socket.SHUT_RDWR)
            return  # it seems to be out
        super().send(message, deadline, payload)
        if self.cut_after == message.NAME:
            Cutting.cut_after, Cutting.cut_after_that = Cutting.cut_after_that, None  # this once
            self.sock.recv(1 << 21)  # it is done, but nobody hears of it
            self.sock.shutdown(socket.SHUT_RDWR)
            Cutting.then()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection: unlike a Unix one, it takes data that nobody will ever read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


class Server:
    """A server with a thread for each connection."""

    def __init__(self, top: Path) -> None:
        self.root = os.open(top, os.O_PATH | os.O_DIRECTORY)
        self.volume = Operations(self.root)
        self.sessions = Sessions(self.volume)
        self.threads: list[threading.Thread] = []
        self.channels: list[Channel] = []
        self.ends: list[RemoteError | None] = []
        self.dialled = 0
        self.refusing = False

    def raw(self) -> socket.socket:
        """A connection, its client's end."""
        ours, theirs = _tcp_pair()
        channel = Channel(theirs, "a client")
        self.channels.append(channel)
        thread = threading.Thread(target=lambda: self.ends.append(serve(channel, self.sessions)), daemon=True)
        thread.start()
        self.threads.append(thread)
        return ours

    def dial(self, _deadline: Deadline) -> Channel:
        self.dialled += 1
        if self.refusing:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody there")
        return Cutting(self.raw(), "csd0")

    def drop(self) -> None:
        """Cut all connections, from the server's side, and wait until it has cleaned up."""
        for channel in self.channels:
            with contextlib.suppress(OSError):  # it has ended already
                channel.sock.shutdown(socket.SHUT_RDWR)
        self.join()

    def restart(self) -> None:
        """Cut all connections, and forget all clients."""
        self.drop()
        self.forget()

    def forget(self) -> None:
        """Remember no client."""
        self.sessions.close()
        self.sessions = Sessions(self.volume)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(SOON)
            assert not thread.is_alive()
        self.threads.clear()
        self.channels.clear()
