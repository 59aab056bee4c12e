# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the templates of projects, which commands write into new folders."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from millpond.base.errors import LocalError


def lay_out(template: str, folder: Path, named: Sequence[str] = ("README.md",)) -> None:
    """Copy a template into a new folder, whose name the files ``named`` get for NAME. Raises LocalError for a
    folder that is not empty, OSError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LocalError(f"{folder} exists and is not an empty folder; choose another name")
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(_source(template), folder, ignore=ignored, dirs_exist_ok=True)
    for path in (folder / name for name in named):
        path.write_text(path.read_text().replace("NAME", folder.absolute().name))


def _source(template: str) -> Path:
    """Return a template's folder: inside the package once installed, beside it in a working tree."""
    package = Path(str(resources.files("millpond.host")))
    installed = package / "templates" / template
    return installed if installed.exists() else package.parents[1] / "templates" / template
