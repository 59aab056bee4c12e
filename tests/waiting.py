# SPDX-License-Identifier: Apache-2.0
"""Waiting for a condition, for all tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T | None], what: str, seconds: float = 30.0, every: float = 0.01) -> T:
    """Return the first value of ``condition`` that is true; fail with ``what`` when none is in time.

    The limit is generous, as a machine may do other things: waiting costs nothing when all is well. A test
    that means "soon" says so with ``seconds`` and is marked ``serial``.
    """
    end = time.monotonic() + seconds
    while True:
        late = time.monotonic() >= end  # before the last look: this process may have stood still in between
        if value := condition():
            return value
        assert not late, f"{what}: not within {seconds:g} s"
        time.sleep(every)
