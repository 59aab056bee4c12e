"""Edge: how many bytes and files the parts of a volume take on the flash."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterator
from pathlib import Path

from millpond.fs.store.layout import PRIVATE, PUBLIC

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


_OUT_OF_SIGHT = (FileNotFoundError, NotADirectoryError, PermissionError)


_TRIES = 10


_Key = tuple[int, int]


class _Moved(Exception):
    """The way back leads elsewhere than the way there came from."""


def private_bytes(backing: Path) -> int:
    """The bytes in private files, each counted once however many names it has; files may come and go."""
    return sum(found.st_size for found in _files(backing / PRIVATE) if stat.S_ISREG(found.st_mode))


def public_usage(backing: Path) -> tuple[int, int]:
    """The bytes that the public part takes on the flash, its directories included, and how many files of
    any kind it has; each is counted once however many names it has.
    """
    found = [status.st_blocks for status in _files(backing / PUBLIC)]
    return sum(found) * 512, len(found)


def _files(top: Path) -> Iterator[os.stat_result]:
    """A directory and all below it, each once, as far as this user may see. Files may come and go. Raises
    OSError: ESTALE if directories are moved again and again.
    """
    seen: set[_Key] = set()
    for _ in range(_TRIES):
        try:
            yield from _walk(top, seen)
        except _Moved:
            continue
        return
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(top))


def _walk(top: Path, seen: set[_Key]) -> Iterator[os.stat_result]:
    """With one descriptor and no recursion: a tree may be deeper than either would allow."""
    here = os.open(top, _DIRECTORY)
    try:
        yield from _new(os.fstat(here), seen)
        way = [(yield from _listed(here, seen))]
        while way:
            key, names = way[-1]
            below = _entered(here, names.pop(), key) if names else None
            if below is not None:
                here = _instead(here, below)
                way.append((yield from _listed(here, seen)))
            elif not names:
                way.pop()
                if way:
                    here = _instead(here, _left(here, way[-1][0]))
    finally:
        os.close(here)


def _listed(here: int, seen: set[_Key]) -> Generator[os.stat_result, None, tuple[_Key, list[str]]]:
    """Which directory this is, and which it holds; what it holds, on the way."""
    directories = []
    with os.scandir(here) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except _OUT_OF_SIGHT:
                continue
            yield from _new(found, seen)
            if stat.S_ISDIR(found.st_mode):
                directories.append(entry.name)
    return _key(os.fstat(here)), directories


def _new(found: os.stat_result, seen: set[_Key]) -> Iterator[os.stat_result]:
    if _key(found) not in seen:
        seen.add(_key(found))
        yield found


def _entered(here: int, name: str, key: _Key) -> int | None:
    """A directory in the one with this key, if it is still there and the way back is open."""
    try:
        below = os.open(name, _DIRECTORY, dir_fd=here)
    except _OUT_OF_SIGHT:
        return None
    try:
        if _key(os.stat("..", dir_fd=below)) == key:
            return below
    except _OUT_OF_SIGHT:
        pass
    os.close(below)
    return None


def _left(here: int, key: _Key) -> int:
    """The directory above, which must be the one with this key."""
    try:
        above = os.open("..", _DIRECTORY, dir_fd=here)
    except _OUT_OF_SIGHT as error:
        raise _Moved from error
    if _key(os.fstat(above)) == key:
        return above
    os.close(above)
    raise _Moved


def _instead(here: int, other: int) -> int:
    os.close(here)
    return other


def _key(found: os.stat_result) -> _Key:
    return found.st_dev, found.st_ino
