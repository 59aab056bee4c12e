# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'simulate'."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.schema import dump
from millpond.host.cli.options import FormatOption, new_app
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import each_told, waiting

app = new_app()


@app.command()
def simulate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FLEET.toml",
            help="A file such as fleet-36.toml, hosts-100.toml, tiers.toml, roofline.toml: agent/examples.",
        ),
    ],
    output: FormatOption = Format.TEXT,
) -> None:
    """Predict how fast a fleet trains, without training.

    The file describes workers by their speed at each batch size and their other load, for synchronous
    training; a table [hosts] describes how many hosts have such workers, and their links. A file with a table
    [tiers] describes a slow and a fast tier of storage, for mini-epochs; one with a table [roofline]
    describes networks, and the bandwidth that feeds them.
    """
    from millpond.host.cli.simulation import fleet, roofline, tiers  # load numpy

    kinds, shows = _tables(file), output is Format.TEXT
    if "tiers" in kinds:
        with waiting(file.name, "simulated", shows=shows):
            by_repeats = tiers.run(tiers.read(file))
        printing.show(output, _document(by_repeats), lambda: tiers.show(by_repeats))
        return
    if "roofline" in kinds:
        with waiting(file.name, "simulated", shows=shows):
            points = roofline.run(roofline.read(file))
        printing.show(output, _document(points), lambda: roofline.show(points))
        return
    found = fleet.read(file)
    cohort = fleet.cohort_of(found, file.name)
    results = fleet.run(found, cohort, each_told(file.name, fleet.POLICIES, "run", shows=shows))
    printing.show(output, _document(results), lambda: fleet.show(results))


def _tables(path: Path) -> Collection[str]:
    """Return the tables of a file; none of one that cannot be read, of which its reader tells."""
    try:
        return tomllib.loads(path.read_text()).keys()
    except (OSError, ValueError):
        return ()


def _document(results: Sequence[object]) -> dict[str, object]:
    return {"results": [dump(result) for result in results], "emulation": "simulated time"}
