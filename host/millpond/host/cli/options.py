# SPDX-License-Identifier: Apache-2.0
"""Edge (the user's directories): options and arguments of several commands, and their completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from millpond.base.errors import MillpondError
from millpond.host.fleet import directory
from millpond.host.records.device_set import ALL
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


def complete_device_sets(context: typer.Context, incomplete: str) -> list[str]:
    """Return texts that name sets of devices, the last part of which is being typed."""
    before, comma, last = incomplete.rpartition(",")
    try:
        config = directory.read(_fleet_of(context)).config
    except (MillpondError, OSError):
        return []
    words = [*(device.name for device in config.device), *(f"@{name}" for name in (ALL, *config.groups))]
    return [f"{before}{comma}{word}" for word in words if word.startswith(last)]


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
        help="The directory of ca.key, update.key and admin_key, if it is not in the fleet's.",
        show_default=False,
    ),
]
AdminOption = Annotated[
    bool, typer.Option("--admin", help="Act as root of the whole device, by the fleet's admin key.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print the result.")]
DeviceArgument = Annotated[
    str,
    typer.Argument(metavar="DEVICE", help="A device's name, such as csd0.", autocompletion=complete_devices),
]
DevicesOption = Annotated[
    str,
    typer.Option(
        "--devices",
        metavar="DEVICES",
        help="Use only these devices: csd0,csd[2-4],@fast.",
        autocompletion=complete_device_sets,
    ),
]
JobArgument = Annotated[
    int, typer.Argument(metavar="JOB", help="The job's number.", autocompletion=complete_jobs)
]
DEFAULT_FLEET = directory.default_directory()
