# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'top': the live view of the fleet."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from millpond.host.cli.exits import loading
from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, new_app
from millpond.host.client.daemon_client import DaemonClient

app = new_app()


@app.command()
def top(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Print lines of text as things change, for screen readers; also into a pipe."
        ),
    ] = False,
) -> None:
    """Show devices, jobs and events live, until q. Keys open logs, shells and jobs, and stop or resume jobs.

    Needs the extra millpond[top], but for --plain. NO_COLOR=1 shows it without colours.
    """
    with DaemonClient(fleet_directory) as client:  # an error is told before the terminal is taken
        name = client.fleet.config.name
    streams = (sys.stdin, sys.stdout, sys.stderr)  # Textual draws on the last
    if plain or not all(stream.isatty() for stream in streams) or os.environ.get("TERM") == "dumb":
        _print_lines(fleet_directory, name)
        return
    with loading():
        from millpond.host.monitor.feed import Feed
        from millpond.host.monitor.top.app import TopApp
    with Feed(fleet_directory) as feed:
        TopApp(feed, name).run()


def _print_lines(fleet: Path, name: str) -> None:
    from millpond.host.monitor.feed import Feed
    from millpond.host.monitor.top import plain

    with Feed(fleet) as feed:
        for line in plain.lines(feed, name):
            print(line, flush=True)
