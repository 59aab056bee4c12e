# SPDX-License-Identifier: Apache-2.0
"""The effort of a test run: ``--effort quick`` (``make test``) or ``--effort full`` (``make test-all``).

Both run the same tests on the same code. A full run repeats more often what a quick one does a few times, and
adds the tests that are marked ``full``.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")

_full = False


def choose(effort: str) -> None:
    """Set the effort of this process; ``tests/conftest.py`` does so before any test module is imported."""
    global _full
    _full = effort == "full"


def is_full() -> bool:
    return _full


def scaled(quick: T, full: T) -> T:
    """Return the number of repetitions, or of seconds, that this run spends."""
    return full if _full else quick
