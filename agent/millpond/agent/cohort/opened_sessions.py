# SPDX-License-Identifier: Apache-2.0
"""Edge (a file): which masked exchanges a device has opened, over jobs, questions and restarts.

Shares are sealed for one session. If a session could be opened twice, a host could give an offer of the first
time to the others again, as that of a device that is lost, and have both secrets of one device. A device
opens each session once: it keeps the highest that it has opened, and opens none below the lowest of these.

What is told in a session is told by its shares. So a device may go on while a session is being noted on its
flash, which takes longer than all else that it does in an exchange, and waits for that before it gives them.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from millpond.base.errors import Refused
from millpond.linux.files import write_durably

FILE = "cohort.sessions"
SESSION_BYTES = 16
FLASH_SECONDS = 8.0
"""Less than the host waits for an answer."""
MOST_KEPT = 256
"""More than the exchanges that are open at the same time: those of several jobs come in any order."""
_LOCK = threading.Lock()  # jobs of the device share the file


class OpenedSessions:
    """The record in the file ``cohort.sessions`` of the directory of the agent's ``state``."""

    def __init__(self, state: Path) -> None:
        self._file = state / FILE
        self._noting = ThreadPoolExecutor(1, "opened sessions")
        self._noted: Future[None] | None = None

    def begin(self, session: bytes) -> None:
        """Begin to note that a session is opened, see ``note``; ``wait`` waits until it is noted. Raises
        Refused if it is known to have been opened before.
        """
        self._noted = None
        with _LOCK:
            self._fresh(session)
        self._noted = self._noting.submit(self.note, session)

    def wait(self, seconds: float = FLASH_SECONDS) -> None:
        """Wait until the session that was begun last is noted durably. Raises Refused if it is not."""
        if self._noted is None:
            raise Refused("", "policy", "policy.cohort: no session was opened")
        try:
            self._noted.result(seconds)
        except TimeoutError:
            text = f"{self._file.name} is not written after {seconds:g} s"
            raise Refused("", "policy", f"policy.cohort: {text}") from None

    def note(self, session: bytes) -> None:
        """Note durably that a ``session`` of SESSION_BYTES, a big-endian number, is opened. Raises Refused if
        it may have been opened before, or if this cannot be noted.
        """
        with _LOCK:
            kept = self._fresh(session)
            try:
                write_durably(self._file, b"".join(sorted({*kept, session})[-MOST_KEPT:]), 0o600)
            except OSError as error:
                raise self._failed(error) from None

    def _fresh(self, session: bytes) -> set[bytes]:
        """Return the sessions that were opened before. Raises Refused if ``session`` may be one of them."""
        if len(session) != SESSION_BYTES:
            raise Refused("", "policy", f"policy.cohort: a session has {SESSION_BYTES} bytes")
        try:
            kept = self._read()
        except OSError as error:
            raise self._failed(error) from None
        if session in kept or (len(kept) >= MOST_KEPT and session < min(kept)):
            text = "this session was opened before, or the host's clock is behind"
            raise Refused("", "policy", f"policy.cohort: {text}")
        return kept

    def _failed(self, error: OSError) -> Refused:
        return Refused("", "policy", f"policy.cohort: {self._file.name}: {error.strerror}")

    def _read(self) -> set[bytes]:
        try:
            data = self._file.read_bytes()
        except FileNotFoundError:
            return set()
        return {data[start : start + SESSION_BYTES] for start in range(0, len(data), SESSION_BYTES)}
