# SPDX-License-Identifier: Apache-2.0
"""Edge: announces to the host's mount which small files a program is about to read, in an order that it
knows.

``for path in prefetch(paths): read(path)``: the next files are fetched while one is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from millpond.fs.fuse.abi import PREFETCH_MOST, prefetch_command

Path = str | bytes | os.PathLike[Any]
P = TypeVar("P", bound=Path)
_WINDOW = 512  # as many as a mount holds of the largest files that it fetches
_MOST_OPEN = 32  # descriptors in the program's own table


def prefetch(paths: Iterable[P], *, window: int = _WINDOW) -> Iterator[P]:
    """Yield the same paths in the same order; a host's mount fetches the small files among the next
    ``window`` before they are read.

    Never fails because of that, whatever the paths are. Takes half a window from ``paths`` at a time, and
    waits for it; an exception of ``paths`` comes after the paths before it.
    """
    coming = iter(paths)
    part = max(1, window // 2)
    failure: Exception | None = None
    with contextlib.closing(_Directories()) as directories:
        queue: deque[P] = deque()
        while True:
            while failure is None and len(queue) <= part:
                some, failure = _take(coming, part)
                if not some:
                    break
                directories.ask(some)
                queue.extend(some)
            if not queue:
                if failure:
                    raise failure
                return
            yield queue.popleft()


def _take(coming: Iterator[P], most: int) -> tuple[list[P], Exception | None]:
    """Return up to ``most`` paths, and the exception that the next one raises."""
    some: list[P] = []
    try:
        some.extend(islice(coming, most))
    except Exception as error:  # noqa: BLE001 - raised to the program after the paths before it
        return some, error
    return some, None


class _Directories:
    """The open directories that files are read from; None for one that is not on a prefetching mount."""

    def __init__(self) -> None:
        self._open: dict[bytes, int | None] = {}

    def ask(self, paths: Sequence[Path]) -> None:
        """Announce these paths, those of one directory at once."""
        names: dict[bytes, list[bytes]] = {}
        for path in paths:
            with contextlib.suppress(ValueError, TypeError):  # no path: the error belongs to the open
                directory, name = os.path.split(os.fsencode(path))
                names.setdefault(directory, []).append(name)
        for directory, some in names.items():
            self._ask(directory, some)

    def _ask(self, directory: bytes, names: Sequence[bytes]) -> None:
        if directory not in self._open:
            self._make_room()
            self._open[directory] = _opened(directory)
        descriptor = self._open[directory]
        if descriptor is not None and not _announced(descriptor, names):
            os.close(descriptor)
            self._open[directory] = None

    def _make_room(self) -> None:
        """Close the directory that was opened first."""
        if len(self._open) >= _MOST_OPEN:
            _close(self._open.pop(next(iter(self._open))))

    def close(self) -> None:
        """Close all directories."""
        for descriptor in self._open.values():
            _close(descriptor)
        self._open.clear()


def _opened(directory: bytes) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return os.open(directory or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _announced(descriptor: int, names: Sequence[bytes]) -> bool:
    """Announce names; return whether the directory is on a prefetching mount."""
    for packed in _packed(names):
        try:
            fcntl.ioctl(descriptor, prefetch_command(len(packed)), packed)
        except OSError:
            return False
    return True


def _packed(names: Sequence[bytes]) -> Iterator[bytearray]:
    """Yield the names, separated by NUL, in parts as large as one ioctl takes."""
    part = bytearray()
    for name in names:
        if len(part) + 1 + len(name) > PREFETCH_MOST and part:
            yield part
            part = bytearray()
        if name and len(name) <= PREFETCH_MOST:
            part += b"\0" + name if part else name
    if part:
        yield part
