# SPDX-License-Identifier: Apache-2.0
"""Edge: let one process at a time hold a lock file, or a name."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from millpond.base.errors import LocalError


@contextlib.contextmanager
def locked(path: Path, complaint: str) -> Iterator[None]:
    """Hold the lock file ``path``. Raises LocalError with the ``complaint`` and the holder's pid."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(descriptor, 32).decode().strip()
        os.close(descriptor)
        raise LocalError(f"{complaint} (pid {pid})") from None
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the pid
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def name_held(name: str) -> Iterator[bool]:
    """Hold a name within this network namespace, by an abstract socket. Yields False if another process, or
    another part of this one, holds it.
    """
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
        try:
            holder.bind(f"\0millpond {digest}")
        except OSError:
            yield False
        else:
            yield True
