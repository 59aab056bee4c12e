# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'new': writes a project that trains: task, job, data, test and README."""

from __future__ import annotations

import shutil
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError
from millpond.host.cli.options import FormatOption, new_app
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
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise LocalError(f"{folder} exists and is not an empty folder; choose another name")
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(_source(template), folder, ignore=ignored, dirs_exist_ok=True)
        readme = (folder / "README.md").read_text()
        (folder / "README.md").write_text(readme.replace("NAME", folder.absolute().name))
    except OSError as error:
        raise LocalError(f"{error.filename or folder}: {error.strerror or error}") from None
    return sorted(path.name for path in folder.iterdir())


def _source(template: Template) -> Path:
    """Return a template's folder: inside the package once installed, beside it in a working tree."""
    package = Path(str(resources.files("millpond.host")))
    installed = package / "templates" / template
    return installed if installed.exists() else package.parents[1] / "templates" / template
