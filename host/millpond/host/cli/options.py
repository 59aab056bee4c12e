# SPDX-License-Identifier: Apache-2.0
"""Edge (the user's directories): options and arguments of several commands, and their completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from millpond.base.errors import MillpondError
from millpond.host.fleet import directory
from millpond.host.terminal.printing import Format


def new_app(**settings: Any) -> typer.Typer:
    """Return a group of commands whose help shows "[...]" as text."""
    return typer.Typer(**{"rich_markup_mode": None, "add_completion": False} | settings)


def complete_devices(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the fleet's devices, for the shell's completion."""
    try:
        found = directory.read(_fleet_of(context)).config.device
    except (MillpondError, OSError):
        return []
    return [device.name for device in found if device.name.startswith(incomplete)]


def complete_jobs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the numbers and names of jobs, newest first, for the shell's completion."""
    from millpond.host.client.daemon_client import DaemonClient  # takes longer to load than some commands

    try:
        with DaemonClient(_fleet_of(context)) as client:
            found = client.jobs()
    except (MillpondError, OSError):
        return []
    return [(str(job.id), job.name) for job in reversed(found) if str(job.id).startswith(incomplete)]


def _fleet_of(context: typer.Context) -> Path:
    given = context.params.get("fleet_directory") or (
        context.parent and context.parent.params.get("fleet_directory")
    )
    return Path(given or DEFAULT_FLEET)


FleetOption = Annotated[
    Path,
    typer.Option(
        "--fleet",
        metavar="DIR",
        help="The fleet's directory.",
        show_default=False,
        envvar="MILLPOND_FLEET",
        readable=False,  # by the daemon's group it is entered alone
    ),
]
AuthorityOption = Annotated[
    Path | None,
    typer.Option(
        "--authority",
        metavar="DIR",
        help="Where ca.key, update.key and admin_key are, if not in the fleet's directory.",
        show_default=False,
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print the result.")]
DeviceArgument = Annotated[
    str,
    typer.Argument(metavar="DEVICE", help="A device's name, such as csd0.", autocompletion=complete_devices),
]
JobArgument = Annotated[
    int, typer.Argument(metavar="JOB", help="The job's number.", autocompletion=complete_jobs)
]
DEFAULT_FLEET = directory.default_directory()
