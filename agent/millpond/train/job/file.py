# SPDX-License-Identifier: Apache-2.0
"""Edge: a job's TOML file, and the files beside it that the job names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from millpond.base import toml
from millpond.base.errors import ConfigError
from millpond.base.schema import load
from millpond.linux.files import sha256_of
from millpond.train.job.check import check
from millpond.train.job.files import MOST_FILES, WHEEL, JobFile, check_job_files
from millpond.train.job.first_values import shards_of
from millpond.train.job.host_spec import TrackSpec
from millpond.train.job.overrides import Settings, overridden
from millpond.train.job.spec import DataSpec, Job


def read(path: Path, settings: Settings = ()) -> tuple[Job, dict[str, Path]]:
    """Return the job, its test folder and the folders of its trackers made absolute, and where its files lie
    by name, with its signature if there is one. ``settings`` change the file's keys, see ``overrides``.
    Raises ConfigError.
    """
    return of_document(toml.document(path), path, settings)


def of_document(
    document: Mapping[str, Any], path: Path, settings: Settings = ()
) -> tuple[Job, dict[str, Path]]:
    """Return the same as ``read`` for the contents of a job file that would lie at ``path``. Raises
    ConfigError.
    """
    job, files = _unsigned(document, path, settings)
    if job.code.signature:
        files |= _find((job.code.signature,), path, f"{job.table}: signature")
    data, track = _with_test_folder(job.data, path), _with_places(job.track, path)
    return dataclasses.replace(job, data=data, track=track), files


def read_unsigned(path: Path) -> tuple[Job, dict[str, Path]]:
    """Return the job, and where its files lie by name. Raises ConfigError."""
    return _unsigned(toml.document(path), path, ())


def _unsigned(document: Mapping[str, Any], path: Path, settings: Settings) -> tuple[Job, dict[str, Path]]:
    where = path.name
    if settings:
        where += " with set" if isinstance(settings, Mapping) else " with --set"
    job = check(load(Job, overridden(document, settings), where), where)
    _check_plain(job.code.arguments, f"{path.name}: {job.table}: arguments")
    _check_plain(job.train.optimizer, f"{path.name}: train: optimizer")
    _check_plain(job.train.scheduler, f"{path.name}: train: scheduler")
    _check_plain(job.strategy, f"{path.name}: federated: strategy")
    initial = job.code.initial
    first = (initial,) if isinstance(initial, str) and initial else ()
    found = _find(job.code.files, path, f"{job.table}: files")
    found |= _find(first, path, f"{job.table}: initial")
    for name in first:
        beside = PurePosixPath(name).parent
        shards = tuple(str(beside / shard) for shard in shards_of(path.parent / name))
        found |= _find(shards, path, f"{job.table}: initial")
    return job, found | _find_wheels(job.code.wheels, path, f"{job.table}: wheels")


def describe(files: Mapping[str, Path], where: str) -> dict[str, JobFile]:
    """Return what is known of the contents of files, which are read for that. Raises ConfigError."""
    found = {}
    for name, path in files.items():
        try:
            found[name] = JobFile(sha256_of(path), path.stat().st_size)
        except OSError as error:
            raise ConfigError(f"{where}: {name}: {error.strerror}") from None
    check_job_files(found, where)
    return found


def _with_test_folder(data: DataSpec, path: Path) -> DataSpec:
    """Return the data with an absolute test folder; in format ``images``, its sub-folders are the classes of
    all workers.
    """
    if not data.test:
        return data
    folder = path.parent / data.test
    if not folder.is_dir():
        raise ConfigError(f"{path.name}: data: test: missing data: there is no folder {folder}")
    classes = data.classes or tuple(class_names(folder) if data.format == "images" else ())
    return dataclasses.replace(data, test=str(folder.resolve()), classes=classes)


def _with_places(track: TrackSpec, path: Path) -> TrackSpec:
    """Return the trackers with absolute folders: what has no colon is a folder."""
    places = {name: place for name, place in dataclasses.asdict(track).items() if place and ":" not in place}
    return dataclasses.replace(
        track, **{name: str((path.parent / place).resolve()) for name, place in places.items()}
    )


def class_names(folder: Path) -> list[str]:
    """Return the names of the sub-folders of a folder, sorted."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


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


def _find(names: tuple[str, ...], path: Path, key: str) -> dict[str, Path]:
    """Return the files that are named, and those in folders that are. Raises ConfigError."""
    folder, where, found = path.parent, f"{path.name}: {key}", dict[str, Path]()
    for given in names:
        name = PurePosixPath(given)
        if name.is_absolute() or ".." in name.parts or not name.parts:
            raise ConfigError(f"{where}: {given}: must be below the job file's folder")
        try:
            for each in _files_in(folder, name, where, ()):
                found[each.as_posix()] = folder / each
                if len(found) > MOST_FILES:
                    raise ConfigError(f"{where}: more than {MOST_FILES} files; put them into an archive")
        except OSError as error:
            raise ConfigError(f"{where}: {error.filename}: {error.strerror}") from None
    return found


def _find_wheels(names: tuple[str, ...], path: Path, key: str) -> dict[str, Path]:
    """Return the wheels that are named, of which a name may be a pattern. Raises ConfigError."""
    found: dict[str, Path] = {}
    for given in names:
        found |= _find(_matching(path.parent, given) or (given,), path, key)
    for name in found:
        if not name.endswith(WHEEL):
            raise ConfigError(f"{path.name}: {key}: {name}: a wheel's name ends with {WHEEL}")
    return found


def _matching(folder: Path, pattern: str) -> tuple[str, ...]:
    name = PurePosixPath(pattern)
    if "*" not in pattern or name.is_absolute() or ".." in name.parts:
        return ()
    return tuple(sorted(match.relative_to(folder).as_posix() for match in folder.glob(pattern)))


def _files_in(
    folder: Path, name: PurePosixPath, where: str, around: tuple[Path, ...]
) -> Iterator[PurePosixPath]:
    """Yield the names of a file, or of those in a folder except for hidden ones and what Python has compiled.
    ``around`` are the folders around it. Raises ConfigError for a link that leads out of ``folder``.
    """
    try:
        place = (folder / name).resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # the last for links in a circle
        raise ConfigError(f"{where}: {name}: no such file") from None
    if not place.is_relative_to(folder.resolve()):
        raise ConfigError(f"{where}: {name}: leads out of the job file's folder")
    if place.is_file():
        yield name
    elif not place.is_dir():
        raise ConfigError(f"{where}: {name}: neither a file nor a folder")
    elif place not in around:  # a link to a folder around it would have no end
        for entry in sorted(place.iterdir()):
            if not entry.name.startswith(".") and entry.name != "__pycache__":
                yield from _files_in(folder, name / entry.name, where, (*around, place))
