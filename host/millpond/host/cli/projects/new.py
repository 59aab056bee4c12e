# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'new': writes a project that trains: task, job, data, test and README."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError
from millpond.host.cli.options import FormatOption, new_app
from millpond.host.cli.projects import templates
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format

app = new_app()


class Template(StrEnum):
    """A kind of project."""

    TEXT = "text"
    TABULAR = "tabular"
    IMAGES = "images"
    FINETUNE = "finetune"


ABOUT = {
    Template.TEXT: "sentiment of short texts by a small transformer",
    Template.TABULAR: "a regression on the rows of a table, scored by R2",
    Template.IMAGES: "labelled images, for which a model is enough",
    Template.FINETUNE: "adapters (LoRA) on a frozen language model; needs transformers",
}


@app.command("new")
def command(
    name: Annotated[
        Path | None, typer.Argument(metavar="NAME", help="The folder of the new project.")
    ] = None,
    template: Annotated[Template, typer.Option(help="What the project trains.")] = Template.TEXT,
    listed: Annotated[bool, typer.Option("--list", help="List the templates, and write nothing.")] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Write a project to begin with.

    It has a task, its job file, data to try it with, a test, and a README.
    """
    if listed:
        lines = "\n".join(f"{each:9} {about}" for each, about in ABOUT.items())
        printing.show(output, {"templates": ABOUT}, lines)
        return
    if name is None:
        raise LocalError("the project needs a name, such as: millpond new mine --template text")
    files = create(name, template)
    text = f"{name} has {', '.join(files)}; README.md says how it trains"
    printing.show(output, {"folder": str(name), "files": files}, text)


def create(folder: Path, template: Template) -> list[str]:
    """Write the project. Returns the names of its files. Raises LocalError for a folder that is not empty."""
    try:
        templates.lay_out(template, folder)
    except OSError as error:
        raise LocalError(f"{error.filename or folder}: {error.strerror or error}") from None
    return sorted(path.name for path in folder.iterdir())
