# SPDX-License-Identifier: Apache-2.0
"""Endpoints on a doorbell server: the host's, and a device's that is a second client, no machine."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
from contextlib import ExitStack
from pathlib import Path

from millpond.linux import sockets
from millpond.tunnel.transports.ivshmem.server_protocol import Roster, ServerMessage

from ..waiting import eventually
from .conftest import DEVICE_ADDRESS, HOST_ADDRESS, INTERFACE, End, Namespace, Program

VECTORS = 3
PYTHON = (sys.executable, "-P", "-W", "error", "-m")


def start_server(undo: ExitStack, path: Path, *options: str) -> Program:
    """Our doorbell server."""
    server = Program(
        [*PYTHON, "millpond.tunnel.transports.ivshmem", "--socket", str(path), *options], lambda: None
    )
    undo.callback(server.close)
    eventually(lambda: "listening" in " ".join(server.errors), "the doorbell server listening")
    return server


def start_strange_server(undo: ExitStack, path: Path, case: str) -> None:
    """One that gives something wrong."""
    program = Path(__file__).with_name("ivshmem_strange_server.py")
    server = Program([sys.executable, str(program), str(path), case], lambda: None)
    undo.callback(server.close)
    server.says("listening")


def start_end(undo: ExitStack, side: Namespace, role: str, where: Path | str, *options: str) -> End:
    """``Namespace.end`` with another transport."""
    address = HOST_ADDRESS if role == "host" else DEVICE_ADDRESS
    reader, writer = os.pipe()
    argv = [*PYTHON, "millpond.tunnel", role, "--ivshmem", str(where)]
    argv += ["--interface", INTERFACE, "--address", f"{address}/30", *options, "--status-fd", str(writer)]
    end = End(argv, side.enter, reader)
    os.close(writer)
    undo.callback(end.close)
    return end


class RawClient:
    """What anybody who may connect to the server gets, without any of an end's manners."""

    def __init__(self, undo: ExitStack, path: Path) -> None:
        self._socket = undo.enter_context(sockets.connect(path))
        self._socket.settimeout(30)
        self.roster = Roster(VECTORS)
        undo.callback(self._release)

    def hear(self) -> None:
        """The next message."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, 8, 1)
        self.roster.take(ServerMessage(struct.unpack("<q", data)[0], descriptors[0] if descriptors else None))
        while self.roster.unused:
            os.close(self.roster.unused.pop())

    def memory(self) -> memoryview:
        """The shared memory."""
        while not self.roster.complete:
            self.hear()
        assert self.roster.memory is not None
        return memoryview(mmap.mmap(self.roster.memory, os.fstat(self.roster.memory).st_size))

    def _release(self) -> None:
        for descriptor in self.roster.release():
            os.close(descriptor)
