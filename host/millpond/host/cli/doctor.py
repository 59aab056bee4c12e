# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'doctor', which says what is wrong with host and fleet, and how to mend it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError
from millpond.host.cli.exits import REMOTE
from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, FormatOption, new_app
from millpond.host.remote.doctor import (
    diagnosis,
    fleet_checks,
    fleet_facts,
    machine_facts,
    prerequisites,
    system_checks,
    system_facts,
)
from millpond.host.terminal.printing import Format, show
from millpond.host.terminal.progress_lines import waiting

app = new_app()


@app.command()
def doctor(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a bug report without names, addresses, paths and keys."),
    ] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Tell what is wrong with host and fleet, and how to mend it.

    Exits with 1 if something is wrong. Works without a daemon and without a fleet. Looks at the kernel's
    features, packages, clocks, disks, certificates, the daemon, and the state, tunnel, version and drive of
    each device. The tunnels' rates are measured unless a job runs.
    """
    with waiting("doctor", "looks at host and fleet", shows=output is Format.TEXT) as tell:
        found = _look(fleet_directory, tell)
    if report:
        _write(report, diagnosis.reported(found))
    document = {"diagnoses": found, "wrong": diagnosis.is_wrong(found)}
    show(output, document, lambda: "\n".join(diagnosis.listed(found, _width())))
    if report and output is Format.TEXT:
        print(f"{report} has the report: look at it before you send it")
    raise typer.Exit(REMOTE if diagnosis.is_wrong(found) else 0)


def _look(directory: Path, tell: Callable[[str], None]) -> list[diagnosis.Diagnosis]:
    machine = machine_facts.look()
    system = system_facts.look(has_namespaces=not machine.namespaces)
    fleet = fleet_facts.look(directory, tell)
    emulates = fleet_checks.emulates(fleet)
    found = [*system_checks.checks(system, emulates=emulates)]
    if emulates:
        found += prerequisites.checks(machine)
    return [*found, *fleet_checks.checks(fleet)]


def _width() -> int:
    """Return the columns of the terminal, 0 where lines are for a program or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}") from None
