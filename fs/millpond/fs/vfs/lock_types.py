# SPDX-License-Identifier: Apache-2.0
"""Pure: the types of file locks, as Linux has them: family, mode, owner and byte range; which are held."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Final

from millpond.fs.vfs.path_api import os_error

OFFSET_MAX: Final = (1 << 63) - 1
"""The last byte of a range to the end of the file, wherever that is."""


class Family(Enum):
    """The two lock families, which do not see each other: POSIX (fcntl) and FLOCK (flock)."""

    POSIX = "posix"
    FLOCK = "flock"


class Mode(IntEnum):
    """Linux's F_RDLCK, F_WRLCK and F_UNLCK. Readers share."""

    READ = 0
    WRITE = 1
    UNLOCK = 2


def mode_of(number: int) -> Mode:
    """Return the mode with this number. Raises OSError: EINVAL if there is none."""
    try:
        return Mode(number)
    except ValueError:
        raise os_error(errno.EINVAL) from None


@dataclass(frozen=True, slots=True)
class Lock:
    """A held or requested lock of the bytes ``start`` to ``end``, both inclusive. ``owner`` is the kernel's
    number of a process (POSIX) or an open file (flock). Raises OSError: EINVAL for a range that no file has.
    """

    owner: int
    mode: Mode
    start: int = 0
    end: int = OFFSET_MAX
    pid: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end <= OFFSET_MAX:
            raise os_error(errno.EINVAL)


Place = tuple[int, Family]
"""A file's number, and one of its two lock tables."""


class HeldLocks:
    """The locks that the owners of one mount hold, as far as the mount knows."""

    def __init__(self) -> None:
        self._held: dict[Place, dict[int, list[Lock]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Place, Lock]]:
        """Iterate over all locks."""
        for place, owners in self._held.items():
            for locks in owners.values():
                for lock in locks:
                    yield place, lock

    def of(self, place: Place, owner: int) -> list[Lock]:
        """Return an owner's locks of a file: sorted, disjoint, adjacent ones of one mode merged."""
        return self._held.get(place, {}).get(owner, [])

    def add(self, place: Place, lock: Lock) -> None:
        """Note that an owner has got this lock, or has unlocked its range."""
        self.put(place, lock.owner, _replaced(self.of(place, lock.owner), lock))

    def put(self, place: Place, owner: int, locks: list[Lock]) -> None:
        """Note that an owner holds these locks of a file, and no others."""
        owners = self._held.setdefault(place, {})
        self._count += len(locks) - len(owners.get(owner, ()))
        if locks:
            owners[owner] = locks
        else:
            owners.pop(owner, None)
        if not owners:
            del self._held[place]

    def pid(self, place: Place, start: int, end: int) -> int:
        """Return the process of the owner that holds just this range; 0 if there is none here."""
        owners = self._held.get(place, {}).values()
        found = (lock.pid for each in owners for lock in each if (lock.start, lock.end) == (start, end))
        return next(found, 0)


def _replaced(locks: list[Lock], new: Lock) -> list[Lock]:
    before, after = [], []
    start, end = new.start, new.end
    for old in locks:
        if old.mode is new.mode and old.start <= new.end + 1 and new.start <= old.end + 1:
            start, end = min(start, old.start), max(end, old.end)
            continue
        if old.start < new.start:
            before.append(old if old.end < new.start else replace(old, end=new.start - 1))
        if old.end > new.end:
            after.append(old if old.start > new.end else replace(old, start=new.end + 1))
    middle = [] if new.mode is Mode.UNLOCK else [replace(new, start=start, end=end)]
    return before + middle + after
