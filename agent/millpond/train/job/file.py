# SPDX-License-Identifier: Apache-2.0
"""Edge: a job's TOML file, and the files of the user's model that it names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from millpond.base import toml
from millpond.base.errors import ConfigError
from millpond.base.schema import load
from millpond.train.job.overrides import overridden
from millpond.train.job.spec import DataSpec, Job, check

CODE_LIMIT = (1 << 20) - (64 << 10)  # bytes; code and job cross the tunnel in one head of at most 1 MiB


def read(path: Path, settings: Sequence[str] = ()) -> tuple[Job, dict[str, str]]:
    """Return the job, its test folder made absolute, and its model's files by name, with their signature if
    there is one. ``settings`` change the file's keys, see ``overrides``. Raises ConfigError.
    """
    job, code = read_unsigned(path, settings)
    if job.model.signature:
        code |= _read_code((job.model.signature,), path)
    return dataclasses.replace(job, data=_with_test_folder(job.data, path)), code


def read_unsigned(path: Path, settings: Sequence[str] = ()) -> tuple[Job, dict[str, str]]:
    """Return the job, and its model's files by name. Raises ConfigError."""
    where = f"{path.name} with --set" if settings else path.name
    job = check(load(Job, overridden(toml.document(path), settings), where), where)
    _check_plain(job.model.arguments, f"{path.name}: model: arguments")
    return job, _read_code(job.model.files, path)


def _with_test_folder(data: DataSpec, path: Path) -> DataSpec:
    folder = path.parent / data.test
    if not folder.is_dir():
        raise ConfigError(f"{path.name}: data: test: missing data: there is no folder {folder}")
    return dataclasses.replace(data, test=str(folder.resolve()))


def _check_plain(value: object, where: str) -> None:
    """Refuse dates and times, which TOML has and no message carries. Raises ConfigError."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_plain(item, f"{where}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_plain(item, f"{where}[{number}]")
    elif not isinstance(value, (str, int, float, bool)):
        raise ConfigError(f"{where}: a {type(value).__name__} cannot be an argument; write it as text")


def _read_code(names: tuple[str, ...], path: Path) -> dict[str, str]:
    code: dict[str, str] = {}
    left = CODE_LIMIT
    for name in names:
        where = f"{path.name}: model: files: {name}"
        file = _own_file(path.parent, name, where)
        left -= file.stat().st_size
        if left < 0:
            raise ConfigError(f"{where}: the model's files are over {CODE_LIMIT} bytes together")
        try:
            code[PurePosixPath(name).as_posix()] = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{where}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: not a text file in UTF-8") from None
    return code


def _own_file(folder: Path, name: str, where: str) -> Path:
    """Return the file behind ``name``. Raises ConfigError if it is not in ``folder``, links followed."""
    file = (folder / name).resolve()
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ConfigError(f"{where}: must be below the job file's folder")
    if not file.is_file():
        raise ConfigError(f"{where}: no such file")
    if not file.is_relative_to(folder.resolve()):
        raise ConfigError(f"{where}: leads out of the job file's folder")
    return file
