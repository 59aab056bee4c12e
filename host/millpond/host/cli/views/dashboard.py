# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'dashboard'."""

from __future__ import annotations

from typing import Annotated

import typer

from millpond.host.cli.exits import loading
from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, new_app

app = new_app()


@app.command("dashboard")
def command(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any that is free.")] = 8321,
    address: Annotated[str, typer.Option(metavar="IP", help="The address to listen on.")] = "127.0.0.1",
    url: Annotated[
        str, typer.Option(metavar="URL", help="The dashboard's URL behind a proxy: https://fleet.example.")
    ] = "",
    control: Annotated[
        bool, typer.Option("--control", help="Print a second URL, to stop, resume and prune jobs by.")
    ] = False,
) -> None:
    """Show the fleet and its jobs as a web page, until Ctrl-C.

    The printed URL has a token, new each time, without which nothing is shown. Who has it sees what you see.
    """
    with loading():
        from millpond.host.monitor.dashboard import main

    main.run(fleet_directory, address, port, url, control=control)
