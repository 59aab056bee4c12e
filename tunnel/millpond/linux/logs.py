# SPDX-License-Identifier: Apache-2.0
"""Edge: write and rotate log files that cannot fill a disk."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

LOG_BYTES = 4 << 20
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def rotate(path: Path, *, most: int = LOG_BYTES) -> None:
    """Rotate a log file of more than ``most`` bytes to the name with ``.1``, replacing the one before."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > most:
            path.replace(path.with_name(path.name + ".1"))


class BoundedLog:
    """Copies the output of processes, written to the descriptor ``writer``, to two files that keep its end.

    The files are their owner's alone and are never reached through a symbolic link. Raises OSError.
    """

    def __init__(self, path: Path, *, most: int = LOG_BYTES) -> None:
        self._path, self._most = path, most
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = self._open()
        reader, self.writer = os.pipe2(os.O_CLOEXEC)
        threading.Thread(target=self._copy, args=(reader,), name=f"log {path.name}", daemon=True).start()

    def _open(self) -> int:
        rotate(self._path, most=self._most)
        return os.open(self._path, _FLAGS, 0o600)

    def _copy(self, reader: int) -> None:
        """Copy until all writers have closed. A full disk costs the log, not the process that writes it."""
        written = 0
        while data := os.read(reader, 1 << 16):
            with contextlib.suppress(OSError):
                written += os.write(self._file, data)
                if written > self._most:
                    fresh = self._open()
                    os.close(self._file)
                    self._file, written = fresh, 0
        os.close(reader)
        os.close(self._file)

    def close_writer(self) -> None:
        """Close this process's copy of ``writer``, once the processes that write have theirs."""
        os.close(self.writer)
