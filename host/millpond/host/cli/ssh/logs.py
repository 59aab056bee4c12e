# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'logs'."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError
from millpond.host.api.daemon import job_number
from millpond.host.cli.options import (
    DEFAULT_FLEET,
    AuthorityOption,
    FleetOption,
    FormatOption,
    complete_devices,
    complete_jobs,
    new_app,
)
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.monitor import log_follow
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import waiting

app = new_app()


def complete_logs(context: typer.Context, incomplete: str) -> list[str | tuple[str, str]]:
    """Return the names that have a log: devices and jobs."""
    return [*complete_devices(context, incomplete), *complete_jobs(context, incomplete)]


@app.command()
def logs(
    target: Annotated[
        str,
        typer.Argument(
            metavar="DEVICE|JOB", help="A device's name or a job's number.", autocompletion=complete_logs
        ),
    ],
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="The number of last lines.")] = 50,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Then print new lines as they come, until Ctrl-C or the job's end; as JSON, one per line.",
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="The job's own log on a device, by the fleet's admin key: prints and whole tracebacks. "
            "That of a private launch is launch-SCRIPT.py, that of transforms transforms-FILE.py.",
            autocompletion=complete_devices,
        ),
    ] = "",
    authority: AuthorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show the log of a device's agent, or of a job. A job's prints on a device stay there.

    Such prints can hold private data, so only root of the device reads them: 'millpond logs --device csd0
    JOB'.
    """
    if device:
        _show_job_log(fleet_directory, authority, device, target, lines, output, follow=follow)
        return
    with DaemonClient(fleet_directory) as client:
        if follow:
            _follow(client, target, lines, as_json=output is Format.JSON)
            return
        found = client.log(target, lines)
    if output is Format.TEXT:
        print("\n".join(found))
    else:
        printing.print_json({"target": target, "lines": found})


def _show_job_log(
    fleet: Path, authority: Path | None, device: str, job: str, lines: int, output: Format, *, follow: bool
) -> None:
    from millpond.host.remote import job_log  # imports paramiko, which takes long

    if job_number(job) is None and not job_log.is_of_launch(job):
        raise LocalError(f"'{job}' is no job's number, such as in: millpond logs --device {device} 3")
    found = job_log.read(fleet, device, job, lines, follow=follow, authority=authority)
    if not follow:
        with waiting(device, "sends the job's log", shows=output is Format.TEXT):
            found = iter(list(found))
    if output is Format.TEXT:
        for line in found:
            print(line, flush=True)
    elif follow:
        for line in found:
            print(json.dumps({"target": job, "device": device, "line": line}), flush=True)
    else:
        printing.print_json({"target": job, "device": device, "lines": list(found)})


def _follow(client: DaemonClient, target: str, lines: int, *, as_json: bool) -> None:
    for entry in log_follow.follow(client, target, lines):
        if as_json:
            kind = "event" if entry.is_event else "line"
            print(json.dumps({"target": target, kind: entry.text}), flush=True)
        elif entry.is_event:
            print(f"millpond: {entry.text}", file=sys.stderr, flush=True)
        else:
            print(entry.text, flush=True)
