"""Waiting for a condition that becomes true before long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T | None], what: str, seconds: float = 30.0, every: float = 0.01) -> T:
    """Return the first true value of ``condition``. Raises AssertionError, which names ``what``, if there is
    none within ``seconds``.
    """
    end = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(every)
