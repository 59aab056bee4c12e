"""Ends on a doorbell server: the host's, and a device's that is no virtual machine but a second client."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from .conftest import DEVICE_ADDRESS, HOST_ADDRESS, INTERFACE, End, Namespace, Program


def start_server(undo: ExitStack, socket: Path, *options: str) -> Program:
    argv = [sys.executable, "-P", "-W", "error", "-m", "millpond.tunnel.ivshmem", "--socket", str(socket)]
    server = Program([*argv, *options], lambda: None)
    undo.callback(server.close)
    wait_for_socket(socket)
    return server


def wait_for_socket(socket: Path) -> None:
    from .conftest import eventually

    eventually(socket.exists, f"{socket}")


def start_end(undo: ExitStack, side: Namespace, role: str, where: Path | str, *options: str) -> End:
    """``Namespace.end`` with another transport."""
    address = HOST_ADDRESS if role == "host" else DEVICE_ADDRESS
    reader, writer = os.pipe()
    argv = [sys.executable, "-P", "-W", "error", "-m", "millpond.tunnel", role, "--ivshmem", str(where)]
    argv += ["--interface", INTERFACE, "--address", f"{address}/30", *options, "--status-fd", str(writer)]
    end = End(argv, side.enter, reader)
    os.close(writer)
    undo.callback(end.close)
    return end
