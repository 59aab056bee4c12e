# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the log of a job on the host: written while it runs, and read by commands."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from millpond.base.errors import LocalError
from millpond.base.text import printable

IS_LAST: Final = "is_last"
"""The attribute of a record that tells a job's end, which commands that follow the job get anyway."""
MOST_LINES: Final = 1000
"""Lines that are kept in memory for commands that follow the job."""
MOST_BYTES: Final = 1 << 20
"""Bytes of a log that are read at once."""


class JobLog(logging.Handler):
    """A job's log: a file in the job's directory, and its last lines in memory for commands that follow the
    job; a record that is ``IS_LAST`` is in the file alone.
    """

    def __init__(self, path: Path, changed: Callable[[], None]) -> None:
        super().__init__()
        self._changed = changed
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Append a record to the lines and the file; a full disk costs the file a line and no more."""
        if not getattr(record, IS_LAST, False):
            text = record.getMessage()  # it may quote what a job's author has written
            self._lines.append(printable(text, len(text), kept="\n\t"))
            self._count += 1
        with contextlib.suppress(OSError, ValueError):
            self._file.write(self.format(record) + "\n")
            self._file.flush()
        self._changed()

    def since(self, seen: int) -> tuple[list[str], int]:
        """Return the lines in memory behind the first ``seen`` ones of all, and the number of all."""
        count = self._count
        new = max(0, count - seen)
        return list(self._lines)[-new:] if new else [], count

    def close(self) -> None:
        """Close the file; the lines in memory stay."""
        self._file.close()
        super().close()


def read(path: Path, lines: int, after: int | None) -> tuple[tuple[str, ...], int, bool]:
    """Return whole lines of a log from byte ``after`` on, or without ``after`` its last ``lines``, as far as
    they lie in MOST_BYTES; the position behind them; and whether more than that is there. Raises LocalError.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            start = max(0, end - MOST_BYTES) if after is None else min(max(0, after), end)
            file.seek(start)
            data = file.read(MOST_BYTES)
    except FileNotFoundError:  # it has not begun
        return (), 0, False
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}") from None
    whole = data[: data.rfind(b"\n") + 1]
    if not whole and len(data) == MOST_BYTES:
        whole = data  # part of a line
    position = start + len(whole)
    found = whole.decode(errors="replace").splitlines()
    if after is None:
        found = found[-lines:] if lines > 0 else []
    return tuple(found), position, bool(whole) and end > position
