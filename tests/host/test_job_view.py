# SPDX-License-Identifier: Apache-2.0
"""A job as it runs, on a terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.live import Live

from millpond.host.model.jobs import Round
from millpond.host.terminal.tables import JobView


def test_the_newest_rounds_stay_on_a_terminal_with_fewer_lines() -> None:
    output = io.StringIO()
    console = Console(width=120, height=10, file=output, force_terminal=True)
    view = JobView(console, ("csd0",))
    with Live(console=console) as live:
        for number in range(1, 31):
            view._show(Round(number, {"host": {"loss": 0.5}}, 1.0, 8, {}, {}, {}), live)
    words = [line.split() for line in output.getvalue().splitlines()]
    rows = [line[0] for line in words if line[1:2] == ["0.5000"]]
    assert rows[-8:] == [str(number) for number in range(23, 31)]
    assert "…" not in output.getvalue()
