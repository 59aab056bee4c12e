# SPDX-License-Identifier: Apache-2.0
"""A log as it grows: each line once, through restarts of its writer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import pytest

from millpond.host.api.daemon import NewLog
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.monitor import log_follow
from millpond.host.monitor.log_follow import LogEntry, follow
from millpond.wire.control_messages import LogPosition


class Daemon:
    """Gives one answer after the other and remembers from where it was asked."""

    def __init__(self, answers: Sequence[NewLog]) -> None:
        self._answers = iter(answers)
        self.asked: list[LogPosition | None] = []

    def new_log(self, target: str, lines: int, after: LogPosition | None) -> NewLog:
        assert (target, lines) == ("csd0", 5)
        self.asked.append(after)
        return next(self._answers)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_follow, "POLL_SECONDS", 0)


def at(boot: str, number: int, *lines: str, lost: int = 0) -> NewLog:
    return NewLog(lines, LogPosition(boot, number), lost)


def told(daemon: Daemon, count: int) -> list[LogEntry]:
    return list(itertools.islice(follow(cast(DaemonClient, daemon), "csd0", 5), count))


def event(text: str) -> LogEntry:
    return LogEntry(text, is_event=True)


def test_each_line_is_told_once() -> None:
    daemon = Daemon([at("x", 7, "a", "b"), at("x", 7), at("x", 8, "c")])
    assert told(daemon, 3) == [LogEntry("a"), LogEntry("b"), LogEntry("c")]
    assert daemon.asked == [None, LogPosition("x", 7), LogPosition("x", 7)]


def test_it_ends_with_the_job() -> None:
    daemon = Daemon([at("", 2, "a"), NewLog(("z",), LogPosition("", 4), ended=True)])
    assert told(daemon, 99) == [LogEntry("a"), LogEntry("z")]


def test_a_device_goes_and_comes_back() -> None:
    gone = NewLog(gone="csd0: Connection refused")
    daemon = Daemon([at("x", 7, "a"), gone, gone, at("y", 2, "b", "c"), at("y", 3, "d")])
    assert told(daemon, 6) == [
        LogEntry("a"),
        event("csd0 is gone: Connection refused"),
        event("csd0 is back: its agent was started again"),
        *map(LogEntry, "bcd"),
    ]
    assert daemon.asked[2:4] == [LogPosition("x", 7)] * 2


def test_only_the_link_was_gone() -> None:
    daemon = Daemon([at("x", 7, "a"), NewLog(gone="no answer"), at("x", 8, "b")])
    assert told(daemon, 4) == [
        LogEntry("a"),
        event("csd0 is gone: no answer"),
        event("csd0 is back"),
        LogEntry("b"),
    ]


def test_a_restart_between_two_questions_is_told_too() -> None:
    daemon = Daemon([at("x", 7, "a"), at("y", 1, "b")])
    assert [entry.text for entry in told(daemon, 4)] == [
        "a",
        "csd0 is gone",
        "csd0 is back: its agent was started again",
        "b",
    ]


def test_a_device_may_be_gone_from_the_start() -> None:
    daemon = Daemon([NewLog(gone="waiting"), at("x", 1, "a")])
    assert told(daemon, 3) == [event("csd0 is gone: waiting"), event("csd0 is back"), LogEntry("a")]


def test_lost_lines_are_counted() -> None:
    daemon = Daemon([at("x", 7), at("x", 2007, "a", lost=1999)])
    assert told(daemon, 2) == [event("1999 lines came too fast and are lost"), LogEntry("a")]
