# SPDX-License-Identifier: Apache-2.0
"""Edge (files): ``millpond new``: writes a project that trains: task, job, data, test and README."""

from __future__ import annotations

import shutil
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError
from millpond.host.cli.options import Format, FormatOption
from millpond.host.terminal import tables


class Template(StrEnum):
    """A kind of project."""

    TEXT = "text"
    TABULAR = "tabular"
    IMAGES = "images"
    FINETUNE = "finetune"


def command(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The project's folder, which is made.")],
    template: Annotated[Template, typer.Option(help="What the project trains.")] = Template.TEXT,
    output: FormatOption = Format.TEXT,
) -> None:
    """Write a project to begin with: a task, its job file, data to try it with, a test, and a README."""
    files = create(name, template)
    if output is Format.JSON:
        tables.print_json({"folder": str(name), "files": files})
    else:
        print(f"{name} has {', '.join(files)}; README.md says how it trains")


def create(folder: Path, template: Template) -> list[str]:
    """Write the project. Returns the names of its files. Raises LocalError if there is such a folder."""
    if folder.exists():
        raise LocalError(f"{folder} exists; choose another name")
    try:
        shutil.copytree(_source(template), folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        readme = (folder / "README.md").read_text()
        (folder / "README.md").write_text(readme.replace("NAME", folder.name))
    except OSError as error:
        raise LocalError(f"{error.filename or folder}: {error.strerror or error}") from None
    return sorted(path.name for path in folder.iterdir())


def _source(template: Template) -> Path:
    """Return a template's folder: inside the package once installed, beside it in a working tree."""
    package = Path(str(resources.files("millpond.host")))
    installed = package / "templates" / template
    return installed if installed.exists() else package.parents[1] / "templates" / template
