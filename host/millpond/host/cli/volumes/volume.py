# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'volume'."""

from __future__ import annotations

from typing import Annotated

import typer

from millpond.host.cli.exits import REMOTE
from millpond.host.cli.options import DEFAULT_FLEET, DeviceArgument, FleetOption, FormatOption, new_app
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import waiting

app = new_app()


@app.command()
def volume(
    device: DeviceArgument,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check all that can be seen from this host; exit code 1 if a fault is found."
        ),
    ] = False,
    operations: Annotated[
        bool,
        typer.Option(
            "--ops", help="Show what programs did on this host's mounts: counts, latencies, errors."
        ),
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show a device's volume: space, clients, leases, mounts."""
    from millpond.host.remote import volume_report
    from millpond.host.terminal import volume_table

    if not check:
        with waiting(device, "counts its files", shows=output is Format.TEXT):
            found = volume_report.ask(fleet_directory, device)
        show = volume_table.show_operations if operations else volume_table.show
        printing.show(output, found, lambda: show(found))
        return
    with waiting(device, "its volume is checked", shows=output is Format.TEXT):
        checked = volume_report.check(fleet_directory, device)
    printing.show(output, checked, lambda: "\n".join(volume_table.lines(checked)))
    raise typer.Exit(REMOTE if checked.findings else 0)
