# SPDX-License-Identifier: Apache-2.0
"""Pure: the files of a job: names, and what is known of their contents without these."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from millpond.base.errors import ConfigError
from millpond.base.text import escaped

MOST_FILES = 4096
"""The most files of a job: names and digests of all cross the tunnel in one head."""
_LONGEST_NAMES = MOST_FILES * 128  # bytes
WHEEL = ".whl"
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class JobFile:
    """The contents of a file: their SHA-256 in hexadecimal digits, and their number of bytes."""

    sha256: str
    size: int


def check_job_files(files: Mapping[str, JobFile], where: str) -> None:
    """Check the files of a job by name. Raises ConfigError, naming ``where``, for too many files and as
    ``check_files``.
    """
    names = sum(len(name.encode(errors="surrogateescape")) for name in files)
    if len(files) > MOST_FILES or names > _LONGEST_NAMES:
        raise ConfigError(f"{where}: {len(files)} files are too many; put them into an archive")
    check_files(files, where)


def check_files(files: Mapping[str, JobFile], where: str) -> None:
    """Check files by name. Raises ConfigError, naming ``where``, for a name that leads out of the files'
    folder or is another file's folder, and for what is no digest.
    """
    for name in files:
        check_name(name, where)
    sizes: dict[str, int] = {}
    for name, file in files.items():
        if not is_digest(file.sha256) or file.size < 0:
            raise ConfigError(f"{where}: {name}: {file.sha256!r:.80} and {file.size} bytes are no file")
        if sizes.setdefault(file.sha256, file.size) != file.size:
            raise ConfigError(f"{where}: {name}: its contents are of two sizes")
    folders = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    if both := folders & files.keys():
        raise ConfigError(f"{where}: '{min(both)}' is a file and a folder")


def is_digest(text: str) -> bool:
    """Return whether ``text`` is a SHA-256 in hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def check_name(name: str, where: str) -> None:
    """Raise ConfigError unless ``name`` is that of a file below a folder, as short as can be."""
    if escaped(name) != name:
        raise ConfigError(f"{where}: '{escaped(name)}' is not UTF-8: rename it")
    path = PurePosixPath(name)
    plain = path.parts and not path.is_absolute() and ".." not in path.parts and str(path) == name
    if not plain or not name.isprintable() or max(len(part.encode()) for part in path.parts) > 255:
        raise ConfigError(f"{where}: '{name:.80}' is not a relative file name")


def contents(files: Mapping[str, JobFile]) -> dict[str, JobFile]:
    """Return the contents by digest, each once."""
    return {file.sha256: file for file in files.values()}


def total_size(files: Mapping[str, JobFile]) -> int:
    """Return the bytes of all contents, each counted once."""
    return sum(file.size for file in contents(files).values())


def wheels_of(files: Mapping[str, JobFile]) -> dict[str, JobFile]:
    """Return the files that are wheels. Their names say so: what an owner signs covers it."""
    return {name: file for name, file in files.items() if name.endswith(WHEEL)}


def laid_out(files: Mapping[str, JobFile]) -> dict[str, JobFile]:
    """Return the files that a worker finds under their names: all but the wheels, which are installed."""
    return {name: file for name, file in files.items() if not name.endswith(WHEEL)}
