# SPDX-License-Identifier: Apache-2.0
"""Edge (a file, a thread): standard input, read once and given whole to each of several commands."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from millpond.host.terminal import streams

_CHUNK = 1 << 16


class SharedInput:
    """Reads the descriptor ``source`` to its end. The data waits in a file without a name, so that no
    reader waits for another. A source that cannot be read has ended.
    """

    def __init__(self, source: int) -> None:
        self._file, path = tempfile.mkstemp(prefix="millpond-")
        Path(path).unlink()
        weakref.finalize(self, os.close, self._file)
        self._size, self._ended = 0, False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(source,), name="standard input", daemon=True).start()

    def _read(self, source: int) -> None:
        with contextlib.suppress(OSError):
            while data := streams.read(source, _CHUNK):
                self._store(data)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _store(self, data: bytes) -> None:
        done = 0
        while done < len(data):  # a disk that fills up takes a part
            done += os.pwrite(self._file, data[done:], self._size + done)
        with self._changed:
            self._size += len(data)
            self._changed.notify_all()

    def reader(self) -> Callable[[], bytes]:
        """Return a function that returns the next bytes from the beginning on, once there are some; b"" at
        the end.
        """
        offset = 0

        def read() -> bytes:
            nonlocal offset
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._size > offset)
                most = min(_CHUNK, self._size - offset)
            data = os.pread(self._file, most, offset)
            offset += len(data)
            return data

        return read
