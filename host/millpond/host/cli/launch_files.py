# SPDX-License-Identifier: Apache-2.0
"""Edge: the files that 'launch' sends: the script's own, wheels, and those of each worker."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.host.api.launch import EVERYONE, LaunchInput
from millpond.train.distributed.launch_messages import SAVED_PART, check_files, check_names, check_size

_CACHES = "__pycache__"


def read_files(
    script: Path, paths: Sequence[Path], *, installed: bool = False
) -> tuple[str, dict[str, bytes]]:
    """Return the script's name and the files to send, without the script's own if it is ``installed`` there,
    by their names in the workers' folder: their paths below the current folder, or their own names if they
    lie elsewhere; of folders all that they hold. Nothing is read before names and sizes have been checked.
    Raises LocalError, OSError.
    """
    own = name_of(script)
    found = {} if installed else {own: script}
    for path in paths:
        for name, file in _named(path):
            if name in found and not found[name].samefile(file):
                raise LocalError(f"two files are named '{name}'")
            found[name] = file
            check_size(len(found), 0)
    check_names(own, found, installed=installed)
    check_size(len(found), sum(len(name.encode()) + path.stat().st_size for name, path in found.items()))
    files = {name: path.read_bytes() for name, path in found.items()}
    check_files(own, files, installed=installed)
    return own, files


def name_of(path: Path) -> str:
    """Return a file's or folder's name in the workers' folder; that of the current folder is its own."""
    whole, here = Path(os.path.abspath(path)), Path.cwd()  # noqa: PTH100 - links stay as they are
    inside = whole != here and whole.is_relative_to(here)
    return (whole.relative_to(here) if inside else Path(whole.name)).as_posix()


def module_file(name: str) -> tuple[Path, bool]:
    """Return the file of the module that ``python -m name`` would run here, and whether it is here: otherwise
    it is installed where it runs. Raises LocalError for what is no name of a module.
    """
    parts = name.split(".")
    if not all(parts) or "/" in name:
        raise LocalError(f"-m {name}: this is no name of a module")
    path = Path(*parts)
    files = (path.with_name(f"{path.name}.py"), path / "__main__.py")
    return next(((file, True) for file in files if file.is_file()), (files[0], False))


def _named(path: Path) -> Iterator[tuple[str, Path]]:
    name = name_of(path)
    if not path.is_dir():
        yield name, _plain(path)
        return
    base = Path() if Path(os.path.abspath(path)) == Path.cwd() else Path(name)  # noqa: PTH100 - as above
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(folder for folder in folders if folder != _CACHES)
        for each in sorted(names):
            file = Path(folder, each)
            yield (base / file.relative_to(path)).as_posix(), _plain(file)
        for link in (Path(folder, each) for each in folders):
            if link.is_symlink():
                raise LocalError(f"{link}: a link to a folder cannot be sent; name that folder itself")


def _plain(path: Path) -> Path:
    path.stat()  # raises if it is not there
    if not path.is_file():
        raise LocalError(f"{path}: only plain files can be sent")
    return path


def read_inputs(folder: Path | None, wheels: Sequence[Path]) -> Iterator[tuple[LaunchInput, bytes]]:
    """Yield the parts of all files below ``folder``/WORKER, and of ``wheels``, or all that a folder holds.
    Raises LocalError, OSError.
    """
    for path in wheels:
        found = sorted(path.glob("*.whl")) if path.is_dir() else [path]
        if not found:
            raise LocalError(f"{path}: there are no wheels (*.whl) in this folder")
        for file in found:
            yield from _parts(file, EVERYONE, file.name, wheel=True)
    for top in sorted(folder.iterdir()) if folder else ():
        if not top.is_dir():
            raise LocalError(f"{top}: lay it into the folder of a worker, such as csd0, or into '{EVERYONE}'")
        for file in sorted(top.rglob("*")):
            if file.is_file() and _CACHES not in file.parts:
                yield from _parts(file, top.name, file.relative_to(top).as_posix())


def _parts(file: Path, worker: str, name: str, *, wheel: bool = False) -> Iterator[tuple[LaunchInput, bytes]]:
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        for start in range(0, max(size, 1), SAVED_PART):
            yield LaunchInput(worker, name, start, size, wheel), opened.read(SAVED_PART)
