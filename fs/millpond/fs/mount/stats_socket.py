# SPDX-License-Identifier: Apache-2.0
"""Edge (Unix sockets): serves a mount's statistics, and reads those of all mounts of a device."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from millpond.base.errors import ConfigError
from millpond.base.schema import dump, load
from millpond.fs.client.metrics import MountStats
from millpond.linux import sockets

_SECONDS = 2.0
_MOST = 1 << 20


@contextlib.contextmanager
def serve_stats(directory: Path, numbers: Callable[[], MountStats]) -> Iterator[None]:
    """Serve a mount's statistics at a socket in this directory, within the context."""
    path = directory / f"{os.urandom(8).hex()}.sock"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        listener = sockets.listen(path)
    except OSError:  # a mount without statistics is better than none
        yield
        return
    threading.Thread(target=_serve, args=(listener, numbers), daemon=True).start()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        listener.close()


def _serve(listener: socket.socket, numbers: Callable[[], MountStats]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the mount has ended
            return
        with connection, contextlib.suppress(OSError):  # the client is gone
            connection.settimeout(_SECONDS)
            connection.sendall(json.dumps(dump(numbers())).encode())


def read_stats(directory: Path, device: str = "") -> list[MountStats]:
    """Return the statistics of each live mount of the device, or of all; remove the sockets of dead ones."""
    found = []
    for path in sorted(directory.glob("*.sock")):
        try:
            numbers = _ask(path)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except (OSError, ValueError, ConfigError):  # the mount is ending, or is of another version
            continue
        else:
            found += [numbers] if device in ("", numbers.device) else []
    return found


def _ask(path: Path) -> MountStats:
    with sockets.connect(path, _SECONDS) as connection:
        text = b""
        while len(text) < _MOST and (part := connection.recv(1 << 16)):
            text += part
    return load(MountStats, json.loads(text), path.name, strict=False)
