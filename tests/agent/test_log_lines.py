# SPDX-License-Identifier: Apache-2.0
"""The agent's log for the host: numbered lines, so that each request gets the new ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from millpond.agent.log_lines import LogLines


@pytest.fixture
def lines() -> Iterator[LogLines]:
    handler = LogLines(kept=4)
    yield handler
    handler.close()


def write(lines: LogLines, *texts: str) -> None:
    for text in texts:
        lines.handle(logging.makeLogRecord({"msg": text}))


def test_nothing_was_logged_yet(lines: LogLines) -> None:
    assert lines.last(5) == ((), 0)
    assert lines.since(0) == ((), 0)


def test_the_last_lines(lines: LogLines) -> None:
    write(lines, "a", "b", "c")
    assert lines.last(2) == (("b", "c"), 3)
    assert lines.last(9) == (("a", "b", "c"), 3)
    assert lines.last(0) == ((), 3)


@pytest.mark.parametrize(
    ("known", "new"), [(0, "abc"), (1, "bc"), (3, ""), (7, "")], ids=["all", "two", "none", "of another time"]
)
def test_what_is_new(lines: LogLines, known: int, new: str) -> None:
    write(lines, "a", "b", "c")
    assert lines.since(known) == (tuple(new), 3)


def test_what_is_kept_no_more_can_be_counted(lines: LogLines) -> None:
    write(lines, *"abcdefg")
    found, count = lines.since(1)
    assert (found, count) == (tuple("defg"), 7)
    assert count - 1 - len(found) == 2  # lost
    assert lines.since(6) == (("g",), 7)
