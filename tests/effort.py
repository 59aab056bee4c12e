# SPDX-License-Identifier: Apache-2.0
"""The effort of a test run: ``--effort quick`` (``make test``), ``full`` (``make test-all``) or ``bench``
(``make test-bench``).

All run the same tests on the same code. A full run repeats more often what a quick one does a few times, and
adds the tests that are marked ``full``; one of benchmarks also adds those that are marked ``bench``.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")

_MARKS = {"quick": frozenset({"full", "bench"}), "full": frozenset({"bench"}), "bench": frozenset[str]()}
EFFORTS = tuple(_MARKS)
_effort = "quick"


def choose(effort: str) -> None:
    """Set the effort of this process; ``tests/conftest.py`` does so before any test module is imported."""
    global _effort
    _effort = effort


def is_full() -> bool:
    return _effort != "quick"


def marks_left_out() -> frozenset[str]:
    """Return the marks of the tests that this run leaves out."""
    return _MARKS[_effort]


def scaled(quick: T, full: T) -> T:
    """Return the number of repetitions, or of seconds, that this run spends."""
    return full if is_full() else quick
