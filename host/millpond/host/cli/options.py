# SPDX-License-Identifier: Apache-2.0
"""Edge (the user's directories): options and arguments that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from millpond.host.fleet import directory


class Format(StrEnum):
    """The format of results: text or JSON."""

    TEXT = "text"
    JSON = "json"


FleetOption = Annotated[
    Path, typer.Option("--fleet", metavar="DIR", help="The fleet's directory.", show_default=False)
]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print the result.")]
DeviceArgument = Annotated[str, typer.Argument(metavar="DEVICE", help="A device's name, such as csd0.")]
DEFAULT_FLEET = directory.default_directory()
