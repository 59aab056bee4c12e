# SPDX-License-Identifier: Apache-2.0
"""Edge (the user's directories): options and arguments of several commands, and their completion."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import MillpondError
from millpond.host.client import DaemonClient
from millpond.host.fleet import directory


class Format(StrEnum):
    """The format of results: text or JSON."""

    TEXT = "text"
    JSON = "json"


def complete_devices(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the fleet's devices, for the shell's completion."""
    try:
        found = directory.read(_fleet_of(context)).config.device
    except (MillpondError, OSError):
        return []
    return [device.name for device in found if device.name.startswith(incomplete)]


def complete_jobs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the numbers and names of jobs, newest first, for the shell's completion."""
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
