# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the files that a data set consists of."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from millpond.train import error_texts
from millpond.train.data.errors import DataError

Where = str | Path | Iterable[str | Path]
"""A folder, a file, or files."""


def find(where: Where, suffix: str) -> list[Path]:
    """Return the files with this suffix in a folder, by name, without hidden ones; a file and a list of files
    are as given. Raises DataError if there are none, or some in folders of the folder.
    """
    if not isinstance(where, str | Path):
        return [Path(each) for each in where]
    path = Path(where)
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.glob(f"*{suffix}") if not each.name.startswith("."))
    for inner in (each for each in path.iterdir() if each.is_dir()):
        if any(inner.glob(f"*{suffix}")):
            text = f"{path} has a folder {inner.name} with *{suffix}: give the list of all files"
            raise DataError(text, str(path), inner.name)
    if not found:
        raise DataError(error_texts.NO_SUCH_FILE(path, f"*{suffix}"))
    return found
