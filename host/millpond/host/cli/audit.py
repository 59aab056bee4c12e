# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'audit': shows what a device has answered, from the log that the device signs."""

from __future__ import annotations

from typing import Annotated

import typer

from millpond.host.cli.options import DEFAULT_FLEET, DeviceArgument, FleetOption, FormatOption, new_app
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format

app = new_app()


@app.command()
def audit(
    device: DeviceArgument,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify signatures, and that the log has only grown since.")
    ] = False,
    anew: Annotated[
        bool, typer.Option("--anew", help="Verify, and forget which entries this host has seen before.")
    ] = False,
    job: Annotated[str, typer.Option(metavar="JOB", help="Show one job alone: its name or number.")] = "",
    entries: Annotated[
        bool, typer.Option("--entries", help="Show each entry, rather than a line for each job.")
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show what a device has answered, to whom, by job.

    The device writes a log of that, with its policies, whose entries are chained by hashes, and signs it.
    """
    from millpond.host.records.audit import is_of, summary
    from millpond.host.remote.audit import reading
    from millpond.host.terminal import audit_table, tables
    from millpond.wire.audit_log import described

    with DaemonClient(fleet_directory) as client:
        copy = reading.read(client, device)
        verdict = None
        if verify or anew:
            from millpond.host.remote.audit import verification  # imports cryptography, which takes long

            verdict = verification.verify(client.fleet, copy, anew=anew)
    line, document = audit_table.verdict_line(verdict), {"device": device, "verified": verdict}
    if entries:
        shown = [described(entry) for entry in copy.entries if not job or is_of(entry.event, job)]
        lines = [*map(audit_table.entry_line, shown), line]
        printing.show(output, document | {"entries": shown}, "\n".join(lines))
    else:
        found = summary(copy.entries, job)
        printing.show(
            output,
            document | {"summary": found},
            lambda: audit_table.show(found, line, tables.console().width),
        )
