# SPDX-License-Identifier: Apache-2.0
"""Edge (logging): the last lines of the agent's log, numbered, for the host to ask for."""

from __future__ import annotations

import logging
from collections import deque

KEPT = 1000


class LogLines(logging.Handler):
    """Keeps the last lines of the log."""

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=kept)
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a log record; the handler's lock is held."""
        self._lines.append(self.format(record))
        self._count += 1

    def last(self, most: int) -> tuple[tuple[str, ...], int]:
        """Return the last lines, ``most`` at most, and how many there have been in all."""
        lines, count = self._now()
        return lines[-most:] if most > 0 else (), count

    def since(self, number: int) -> tuple[tuple[str, ...], int]:
        """Return the kept lines behind the first ``number``, and how many there have been."""
        lines, count = self._now()
        return lines[max(0, len(lines) - max(0, count - number)) :], count

    def _now(self) -> tuple[tuple[str, ...], int]:
        self.acquire()
        try:
            return tuple(self._lines), self._count
        finally:
            self.release()
