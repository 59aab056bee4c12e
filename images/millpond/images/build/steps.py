# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock, a file): the steps of a build, with how long each has taken, now and the last time."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PERIOD_SECONDS = 10.0
"""Time between two lines about a step."""


class BuildSteps:
    """Runs the steps of a build. Their seconds are kept in ``file``, for the next build."""

    def __init__(
        self, file: Path, tell: Callable[[str], None] = lambda line: print(line, flush=True)
    ) -> None:
        self._file, self._tell = file, tell
        self._last: dict[str, float] = {}
        with contextlib.suppress(OSError, ValueError):
            self._last = {str(name): float(seconds) for name, seconds in json.loads(file.read_text()).items()}

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Return what ``work`` returns; its beginning, its end and a line now and then are told."""
        last = f" (last time {self._last[name]:.0f} s)" if self._last.get(name, 0.0) >= 1 else ""
        self._tell(f"millpond image: {name} ...{last}")
        began, end = time.monotonic(), threading.Event()

        def tell_on() -> None:
            while not end.wait(PERIOD_SECONDS):
                self._tell(f"millpond image: {name}: {time.monotonic() - began:.0f} s so far{last}")

        ticker = threading.Thread(target=tell_on, daemon=True)
        ticker.start()
        try:
            result = work()
        finally:
            end.set()
            ticker.join()
        self._last[name] = time.monotonic() - began
        self._tell(f"millpond image: {name}: {self._last[name]:.1f} s")
        with contextlib.suppress(OSError):  # a full disk is told by what is built
            self._file.write_text(json.dumps(self._last))
        return result
