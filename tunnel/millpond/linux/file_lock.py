# SPDX-License-Identifier: Apache-2.0
"""Edge: let one process at a time hold a lock file."""

from __future__ import annotations

import contextlib
import fcntl
import os
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
