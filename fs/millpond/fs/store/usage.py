# SPDX-License-Identifier: Apache-2.0
"""Edge: tells how full a file system is, and what the parts of a volume take on the flash."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterator
from pathlib import Path

from millpond.fs.store.layout import PRIVATE, PUBLIC
from millpond.fs.vfs.path_api import Statistics

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


_NOT_VISIBLE = (FileNotFoundError, NotADirectoryError, PermissionError)


_TRIES = 10


_Key = tuple[int, int]


class _DirectoryMoved(Exception):
    """Raised when a directory's parent is not the one through which the walk came."""


def statistics(path: bytes) -> Statistics:
    """Return how full the file system at `path` is. Raises OSError."""
    s = os.statvfs(path)
    return Statistics(
        s.f_bsize, s.f_frsize, s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_namemax
    )


def private_bytes(backing: Path) -> int:
    """Return the bytes in private files, each counted once however many names it has; files may come
    and go.
    """
    return sum(found.st_size for found in _files(backing / PRIVATE) if stat.S_ISREG(found.st_mode))


def public_usage(backing: Path) -> tuple[int, int]:
    """Return the bytes that the public part takes on the flash, its directories included, and how many files
    of any kind it has; each is counted once however many names it has.
    """
    found = [status.st_blocks for status in _files(backing / PUBLIC)]
    return sum(found) * 512, len(found)


def _files(top: Path) -> Iterator[os.stat_result]:
    """Iterate over a directory and all below it, each once, as far as this user may see. Files may come and
    go. Raises OSError: ESTALE if directories are moved again and again.
    """
    seen: set[_Key] = set()
    for _ in range(_TRIES):
        try:
            yield from _walk(top, seen)
        except _DirectoryMoved:
            continue
        return
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(top))


def _walk(top: Path, seen: set[_Key]) -> Iterator[os.stat_result]:
    """Walk a tree with one descriptor and no recursion: it may be deeper than either would allow."""
    here = os.open(top, _DIRECTORY)
    try:
        yield from _first_seen(os.fstat(here), seen)
        way = [(yield from _list(here, seen))]
        while way:
            key, names = way[-1]
            below = _enter(here, names.pop(), key) if names else None
            if below is not None:
                here = _replace(here, below)
                way.append((yield from _list(here, seen)))
            elif not names:
                way.pop()
                if way:
                    here = _replace(here, _leave(here, way[-1][0]))
    finally:
        os.close(here)


def _list(here: int, seen: set[_Key]) -> Generator[os.stat_result, None, tuple[_Key, list[str]]]:
    """Yield the files in a directory. Returns the directory's key and the names of its subdirectories."""
    directories = []
    with os.scandir(here) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except _NOT_VISIBLE:
                continue
            yield from _first_seen(found, seen)
            if stat.S_ISDIR(found.st_mode):
                directories.append(entry.name)
    return _key(os.fstat(here)), directories


def _first_seen(found: os.stat_result, seen: set[_Key]) -> Iterator[os.stat_result]:
    if _key(found) not in seen:
        seen.add(_key(found))
        yield found


def _enter(here: int, name: str, key: _Key) -> int | None:
    """Open a directory below the one with this key, if it still exists and its parent is that one."""
    try:
        below = os.open(name, _DIRECTORY, dir_fd=here)
    except _NOT_VISIBLE:
        return None
    try:
        if _key(os.stat("..", dir_fd=below)) == key:
            return below
    except _NOT_VISIBLE:
        pass
    os.close(below)
    return None


def _leave(here: int, key: _Key) -> int:
    """Open the parent directory, which must be the one with this key."""
    try:
        above = os.open("..", _DIRECTORY, dir_fd=here)
    except _NOT_VISIBLE as error:
        raise _DirectoryMoved from error
    if _key(os.fstat(above)) == key:
        return above
    os.close(above)
    raise _DirectoryMoved


def _replace(here: int, other: int) -> int:
    os.close(here)
    return other


def _key(found: os.stat_result) -> _Key:
    return found.st_dev, found.st_ino
