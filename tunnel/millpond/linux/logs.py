# SPDX-License-Identifier: Apache-2.0
"""Edge: write and rotate log files that cannot fill a disk, and logs that nobody reads."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from pathlib import Path

LOG_BYTES = 4 << 20
WAITING = 1000
_FLUSH_SECONDS = 1.0
_LAST_BYTES = 4096
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def rotate(path: Path, *, most: int = LOG_BYTES) -> None:
    """Rotate a log file of more than ``most`` bytes to the name with ``.1``, replacing the one before."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > most:
            path.replace(path.with_name(path.name + ".1"))


class UnblockedHandler(logging.Handler):
    """Writes to standard error in a thread of its own: no other thread waits for a reader that stands
    still. Of the lines that wait meanwhile the first WAITING stay, and the number of the others is told.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str] = queue.Queue(WAITING)
        self._lost, self._process = 0, os.getpid()
        threading.Thread(target=self._write_all, name="log", daemon=True).start()
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line; a fork, which has no such thread, writes it."""
        line = self.format(record)
        if os.getpid() != self._process:
            _write(line)
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def _write_all(self) -> None:
        while True:
            line = self._lines.get()
            _write(line)
            if self._lost and self._lines.qsize() < WAITING // 2:
                lost, self._lost = self._lost, 0
                _write(f"{lost} lines of the log were lost: nobody has read it")
            self._lines.task_done()

    def flush(self) -> None:
        """Wait a moment until all lines are written."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader has ended
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


class BoundedLog:
    """Copies the output of processes, written to the descriptor ``writer``, to two files that keep its end.

    The files are their owner's alone and are never reached through a symbolic link. Raises OSError.
    """

    def __init__(self, path: Path, *, most: int = LOG_BYTES) -> None:
        self._path, self._most = path, most
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file, self._last = self._open(), b""
        reader, self.writer = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(
            target=self._copy, args=(reader,), name=f"log {path.name}", daemon=True
        )
        self._thread.start()

    def _open(self) -> int:
        rotate(self._path, most=self._most)
        return os.open(self._path, _FLAGS, 0o600)

    def _copy(self, reader: int) -> None:
        """Copy until all writers have closed. A full disk costs the log, not the process that writes it."""
        written = 0
        while data := os.read(reader, 1 << 16):
            self._last = (self._last + data)[-_LAST_BYTES:]
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

    def last_lines(self, lines: int, seconds: float) -> list[str]:
        """Return the last lines that were written, empty ones left out, after a wait of at most ``seconds``
        until all writers have closed.
        """
        self._thread.join(seconds)
        found = self._last.decode(errors="replace").splitlines()
        return [line for line in found if line.strip()][-lines:]
