# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'cp'."""

from __future__ import annotations

from typing import Annotated

import typer

from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, FormatOption, new_app
from millpond.host.terminal.printing import Format

app = new_app()


@app.command()
def cp(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... TARGET",
            help="On devices: csd0:public/..., csd[0-2]:..., @fast:...; other paths are on this machine.",
        ),
    ],
    fleet_directory: FleetOption = DEFAULT_FLEET,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Copy directories with all in them.")
    ] = False,
    checksum: Annotated[
        bool,
        typer.Option(
            "--checksum",
            "-c",
            help="Compare contents with the files at the target, instead of size and time.",
        ),
    ] = False,
    delete: Annotated[
        bool,
        typer.Option(
            "--delete", help="Then delete from the target's directories what the source does not have."
        ),
    ] = False,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leave out names such as '*.tmp', paths such as 'raw/*.bin', directories such as 'cache/'; "
            "--delete leaves them alone. May be repeated.",
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="At Ctrl-C keep the part of a file that has come, for the next copy."),
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Copy files to devices, from them, or from one to another.

    The devices' sides are the public parts of their volumes. The target may be several devices at once.

    After a failure or Ctrl-C, repeat the same command: it continues. A file that cannot be copied does not
    stop the others; it is named at the end, with exit code 1. The copy keeps modes, times, holes, hard links
    and extended attributes (user.*). Two copies at once do not disturb each other.
    """
    from millpond.host.cli.volumes import copy
    from millpond.host.remote.copies.rules import CopyRules, Exclusions

    rules = CopyRules(Exclusions(tuple(exclude or ())), checksum, delete, partial)
    copy.run(fleet_directory, paths, rules, recursive=recursive, as_json=output is Format.JSON)
