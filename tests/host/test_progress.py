# SPDX-License-Identifier: Apache-2.0
"""How far something is: copies without a terminal, the stage of a job, and what a command says of it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from millpond.base.text import duration
from millpond.host.api.daemon import JobInfo
from millpond.host.api.progress import JobProgress
from millpond.host.jobs.stage import JobStage, StageWatch
from millpond.host.records.jobs import Round
from millpond.host.terminal import progress_bars, progress_lines, tables
from millpond.host.terminal.job_clock import JobClock
from millpond.host.terminal.progress_bars import ProgressBars
from millpond.host.terminal.progress_lines import ProgressLines, described, view
from millpond.train.local.pace import PERIOD_SECONDS, ExchangePace

from ..waiting import eventually

INFO = JobInfo(3, "j", "running", "", "", 0, 10, "round", "", None, None, 0, 0.0, None, stage="training")
ROUND = Round(1, {}, 60.0, 10, {}, {}, {})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89.0, "89 s"), (180.0, "3 min"), (5399.0, "1 h 30 min"), (7500.0, "2 h 5 min")],
)
def test_a_time_is_told_in_two_numbers_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_copy_without_a_terminal_has_a_line_until_it_ends() -> None:
    told, clock = list[str](), Clock()
    lines = ProgressLines(tell=told.append, clock=clock)
    advance = lines.begin("data.npy", 10_000_000)
    lines.look()
    advance(2_500_000)
    clock.now += 10
    lines.look()
    advance(7_500_000)
    lines.look()
    assert told == ["data.npy: 0% of 10.0 MB", "data.npy: 25% of 10.0 MB, 250.0 kB/s, 30 s left"]
    assert described("none", 0, 0, 1.0) == "none: 0% of 0 B"


def test_something_without_a_known_end_says_for_how_long_it_has_lasted() -> None:
    told, clock = list[str](), Clock()
    lines = ProgressLines(tell=told.append, clock=clock)
    with lines.status("data") as say:
        clock.now += 10
        lines.look()
        say("2,000 files found")
        clock.now += 60
        lines.look()
    lines.look()
    assert told == ["data: 10 s so far", "data: 2,000 files found, 70 s so far"]


def test_on_a_terminal_a_status_has_a_line_from_its_first_word_on(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=True)
    monkeypatch.setattr(progress_bars, "console", lambda: console)
    with ProgressBars() as bars:
        with bars.status("data"):
            pass
        assert not output.getvalue()
        with bars.status("data") as say:
            say("2,000 files found")
            bars.begin("copy", 100)(50)
            eventually(lambda: "50/100 bytes" in output.getvalue(), "the bar", 20, 0.01)
    assert "data: 2,000 files found" in output.getvalue() and "0 s so far" in output.getvalue()


def test_lines_come_now_and_then_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: a copy whose output went to a file said nothing until its end."""
    monkeypatch.setattr(progress_lines, "PERIOD_SECONDS", 0.001)
    told = io.StringIO()
    monkeypatch.setattr("sys.stderr", told)
    with view(terminal=False) as shown:
        shown.begin("a", 10)(1)
        while not told.getvalue():
            pass
    with view(terminal=False, shows=False) as shown:
        shown.begin("b", 10)(1)
        shown.print("b is left out")
    assert told.getvalue().startswith("a: 10% of 10 B") and "b" not in told.getvalue().replace("B/s", "")


def test_an_exchange_is_told_in_percents_that_grow_and_not_often() -> None:
    told, clock = list[int](), Clock()
    pace = ExchangePace(told.append, clock)
    pace.begin(200)
    for _ in range(200):
        pace.add(1)
        clock.now += PERIOD_SECONDS / 10
    assert told == sorted(set(told)) and told[0] == 5 and len(told) == 19
    count = len(told)
    for total in (0, 10):  # nobody knows how far it is; it is at the end, which the answer tells
        pace.begin(total)
        clock.now += PERIOD_SECONDS
        pace.add(10)
    assert len(told) == count


def test_followers_of_a_job_are_told_of_whole_percents_and_not_often() -> None:
    calls, clock = list[float](), Clock()
    watch = StageWatch(lambda: calls.append(clock.now), clock)
    watch.enter(JobStage.TRAINING)
    for step in range(100):
        watch.look(lambda: step / 1000)  # noqa: B023 - it is called at once
        clock.now += 0.25
    assert len(calls) == 1 + 9 and watch.done == 0.096, calls
    watch.set(JobStage.SCORING)
    assert (watch.stage, watch.done, len(calls)) == (JobStage.SCORING, 0.0, 10)


def test_a_job_s_line_has_its_round_and_what_is_left() -> None:
    clock = JobClock()
    assert clock.told(replace(INFO, stage="preparing", done=0.5), [], 0.0) == (
        "job 3: preparing the workers: 50% are ready"
    )
    waiting = replace(INFO, stage="waiting for an order", round=5)
    assert clock.told(waiting, [], 0.0) == "job 3: waiting for an order after round 5"
    assert clock.told(INFO, [], 10.0) == "round 1 of 10: 0%"
    assert clock.told(replace(INFO, done=0.1), [], 20.0) == "round 1 of 10: 10%, about 16 min left"
    later = replace(INFO, round=8, done=0.5)
    assert clock.told(later, [ROUND], 30.0) == "round 9 of 10: 50%, about 2 min left"
    assert clock.told(replace(later, stage="scoring"), [ROUND], 30.0) == "round 9 of 10: scoring"
    assert clock.told(replace(INFO, stage=""), [], 0.0) == ""


def test_without_a_terminal_a_job_says_now_and_then_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PERIOD_SECONDS", 0.0)
    output = io.StringIO()
    progresses = [JobProgress(replace(INFO, done=part)) for part in (0.0, 0.25)]
    shown = tables.JobView(Console(file=output, width=160), ["csd0"])
    shown.follow([*progresses, JobProgress(replace(INFO, state="done", stage="", round=1), (ROUND,))])
    lines = output.getvalue().splitlines()
    assert lines[0] == "round 1 of 10: 0%" and lines[1].startswith("round 1 of 10: 25%")


def test_on_a_terminal_the_line_stands_below_the_table() -> None:
    output = io.StringIO()
    console = Console(file=output, width=160, height=30, force_terminal=True)
    runs, ended = replace(INFO, round=1, done=0.5), replace(INFO, state="done", stage="")

    def progresses() -> Iterator[JobProgress]:
        yield JobProgress(runs, (ROUND,))
        eventually(lambda: "round 2 of 10: 50%" in output.getvalue(), "the line", 20, 0.01)
        yield JobProgress(ended)

    tables.JobView(console, ["csd0"]).follow(progresses())
    assert "round 2 of 10" not in output.getvalue().splitlines()[-1]


def test_something_that_lasts_is_told_after_a_moment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_lines, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress_lines, "PERIOD_SECONDS", 0.01)
    with progress_lines.waiting("run", "waits for csd0, csd1") as tell:
        told = eventually(
            lambda: "run: waits for csd0, csd1, " in capsys.readouterr().err, "a line", 20, 0.01
        )
        tell("waits for csd1")
        eventually(lambda: "run: waits for csd1, " in capsys.readouterr().err, "another line", 20)
    with progress_lines.waiting("run", "", shows=False):
        pass
    assert told and not capsys.readouterr().out
