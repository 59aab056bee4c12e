# SPDX-License-Identifier: Apache-2.0
"""Edge (a file): which masked exchanges a device has opened, over jobs, questions and restarts.

Shares are sealed for one session. If a session could be opened twice, a host could give an offer of the first
time to the others again, as that of a device that is lost, and have both secrets of one device. A device
opens each session once: it keeps the highest that it has opened, and opens none below the lowest of these.
"""

from __future__ import annotations

import threading
from pathlib import Path

from millpond.base.errors import Refused
from millpond.linux.files import write_durably

FILE = "cohort.sessions"
SESSION_BYTES = 16
MOST_KEPT = 256
"""More than the exchanges that are open at the same time: those of several jobs come in any order."""
_LOCK = threading.Lock()  # jobs of the device share the file


class OpenedSessions:
    """The record in the file ``cohort.sessions`` of the directory of the agent's ``state``."""

    def __init__(self, state: Path) -> None:
        self._file = state / FILE

    def note(self, session: bytes) -> None:
        """Note durably that a ``session`` of SESSION_BYTES, a big-endian number, is opened. Raises Refused if
        it may have been opened before, or if this cannot be noted.
        """
        if len(session) != SESSION_BYTES:
            raise Refused("", "policy", f"policy.cohort: a session has {SESSION_BYTES} bytes")
        try:
            with _LOCK:
                kept = self._read()
                if session in kept or (len(kept) >= MOST_KEPT and session < min(kept)):
                    text = "this session was opened before, or the host's clock is behind"
                    raise Refused("", "policy", f"policy.cohort: {text}")
                write_durably(self._file, b"".join(sorted({*kept, session})[-MOST_KEPT:]), 0o600)
        except OSError as error:
            raise Refused("", "policy", f"policy.cohort: {self._file.name}: {error.strerror}") from None

    def _read(self) -> set[bytes]:
        try:
            data = self._file.read_bytes()
        except FileNotFoundError:
            return set()
        return {data[start : start + SESSION_BYTES] for start in range(0, len(data), SESSION_BYTES)}
