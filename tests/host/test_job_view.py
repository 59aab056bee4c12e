# SPDX-License-Identifier: Apache-2.0
"""A job as it runs, on a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console

from millpond.host.api.daemon import JobInfo, JobProgress
from millpond.host.records.jobs import Round
from millpond.host.terminal.tables import JobView

from ..waiting import eventually

JOB = JobInfo(7, "digits", "running", "", "", 3, 30, "round", "loss", None, None, 0, 0.0, None)


def test_the_newest_rounds_are_shown_on_a_terminal_with_fewer_lines_and_all_in_the_end() -> None:
    output = io.StringIO()
    console = Console(width=120, height=10, file=output, force_terminal=True)

    def progresses() -> Iterator[JobProgress]:
        for number in range(1, 31):
            yield JobProgress(JOB, (Round(number, {"host": {"loss": 0.5}}, 1.0, 8, {}, {}, {}),))
        eventually(lambda: 30 in rounds(output.getvalue()), "the newest round")
        output.truncate(0)

    JobView(console, ("csd0",)).follow(progresses())
    assert rounds(output.getvalue()) == list(range(1, 31))


def rounds(shown: str) -> list[int]:
    """Return the rounds whose lines are shown."""
    words = [line.split() for line in shown.splitlines()]
    return [int(line[0]) for line in words if line[1:2] == ["0.5000"]]
