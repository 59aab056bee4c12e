# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the files that a launch gives its workers, and the wheels that it installs there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.host.api.launch import EVERYONE, LaunchInput
from millpond.train.distributed.launch_messages import SAVED_PART

CACHES = "__pycache__"


@dataclass(frozen=True, slots=True)
class InputFile:
    """A ``file`` that a ``worker``, or each, finds by this ``name``, or installed if it is a ``wheel``."""

    file: Path
    worker: str
    name: str
    wheel: bool = False

    @property
    def size(self) -> int:
        """Its bytes. Raises OSError."""
        return self.file.stat().st_size


def list_inputs(folder: Path | None, wheels: Sequence[Path]) -> list[InputFile]:
    """Return all files below ``folder``/WORKER, and ``wheels``, or all that a folder holds. Raises
    LocalError, OSError.
    """
    found = list[InputFile]()
    for path in wheels:
        files = sorted(path.glob("*.whl")) if path.is_dir() else [path]
        if not files:
            raise LocalError(f"{path}: there are no wheels (*.whl) in this folder")
        found += (InputFile(file, EVERYONE, file.name, wheel=True) for file in files)
    for top in sorted(folder.iterdir()) if folder else ():
        if not top.is_dir():
            raise LocalError(f"{top}: lay it into the folder of a worker, such as csd0, or into '{EVERYONE}'")
        for file in sorted(top.rglob("*")):
            if file.is_file() and CACHES not in file.parts:
                found.append(InputFile(file, top.name, file.relative_to(top).as_posix()))
    return found


def read_inputs(files: Iterable[InputFile]) -> Iterator[tuple[LaunchInput, bytes]]:
    """Yield the parts of all files. Raises OSError."""
    for each in files:
        with each.file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            for start in range(0, max(size, 1), SAVED_PART):
                yield LaunchInput(each.worker, each.name, start, size, each.wheel), opened.read(SAVED_PART)
