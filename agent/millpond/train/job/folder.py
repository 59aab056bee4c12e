# SPDX-License-Identifier: Apache-2.0
"""Edge: a folder of test data as a manifest, the list of its files, which has a digest as a file has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from millpond.base.errors import ConfigError
from millpond.base.schema import dump, load
from millpond.linux.files import sha256_of
from millpond.train.job.files import JobFile, check_files, check_name

MOST_FOLDER_FILES = 1 << 18
LARGEST_MANIFEST = 64 << 20
"""Bytes of a manifest: it is in memory as a whole."""


@dataclass(frozen=True, slots=True)
class FolderManifest:
    """The ``files`` below a folder by name, and the ``folders`` there that are empty."""

    files: dict[str, JobFile]
    folders: tuple[str, ...] = ()

    @property
    def data(self) -> bytes:
        """The manifest as text; two folders with the same contents have the same."""
        return json.dumps(dump(self), sort_keys=True, separators=(",", ":")).encode()


Begin = Callable[[int], Callable[[int], None]]


def manifest_of(
    folder: Path, where: str, begin: Begin = lambda _total: lambda _count: None
) -> FolderManifest:
    """Return the manifest of ``folder``, all files of which are read; links are followed, but not into a
    folder around them. ``begin`` is called with their bytes, and what it returns with those of each part that
    is read. Raises ConfigError, naming ``where``.
    """
    files, folders = dict[str, JobFile](), list[str]()
    try:
        entries = list(islice(_entries(folder, ()), MOST_FOLDER_FILES + 1))
        if len(entries) > MOST_FOLDER_FILES:
            raise ConfigError(f"{where}: more than {MOST_FOLDER_FILES} files; put them into archives")
        advance = begin(sum(path.stat().st_size for path, is_file in entries if is_file))
        for path, is_file in entries:
            name = path.relative_to(folder).as_posix()
            if is_file:
                files[name] = JobFile(sha256_of(path, advance), path.stat().st_size)
            else:
                folders.append(name)
    except OSError as error:
        raise ConfigError(f"{where}: {error.filename}: {error.strerror}") from None
    return checked(FolderManifest(files, tuple(sorted(folders))), where)


def _entries(folder: Path, around: tuple[tuple[int, int], ...]) -> Iterator[tuple[Path, bool]]:
    """Yield the files below a folder with True, and its empty folders with False. Raises OSError."""
    found = folder.stat()
    here = (*around, (found.st_dev, found.st_ino))
    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path, True
        elif path.is_dir() and (path.stat().st_dev, path.stat().st_ino) not in here:
            if any(path.iterdir()):
                yield from _entries(path, here)
            else:
                yield path, False


def read(data: bytes, where: str) -> FolderManifest:
    """Return the manifest that ``data`` is the text of. Raises ConfigError, naming ``where``."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: it is no manifest") from None
    return checked(load(FolderManifest, document, where), where)


def checked(manifest: FolderManifest, where: str) -> FolderManifest:
    """Return ``manifest`` unchanged. Raises ConfigError for names that lead out of its folder."""
    for name in manifest.folders:
        check_name(name, where)
    check_files(manifest.files, where)
    if len(manifest.files) + len(manifest.folders) > MOST_FOLDER_FILES:
        raise ConfigError(f"{where}: more than {MOST_FOLDER_FILES} files; put them into archives")
    return manifest
