# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): writers of records on a mount, by several system calls, which journal each fsync."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conformance import records
from conformance.records import LARGEST, How, Record, Write
from millpond.linux import syscalls

SHARED = "shared"
_ROLL = 6 << 20
_FILES = 12
_SLOTS = {1000: 16, 4096: 16, 65_536: 8, (1 << 20) + 8192: 2}
_PAUSE = 0.02
_TREES = 3
_DEEPEST = 3
_MOST_AT_ONCE = 12
_LOOKS = 0.01  # of all steps


def start(place: Path, number: int, notes: Path, seed: int, pause: float) -> int:
    """A process that writes below ``place`` until it is killed, in the directories that ``prepare`` made;
    ``pause`` is how long it does nothing after each step, in the mean.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        syscalls.die_with_parent(signal.SIGKILL)
        noted = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        Writer(place, number, noted, random.Random(seed)).run(pause)
    except BaseException:  # noqa: BLE001 - shown; nothing may go on in a copy of the caller
        traceback.print_exc()
    finally:
        os._exit(1)


def prepare(place: Path, numbers: Sequence[int]) -> None:
    """Make the directories of these writers, so that they outlive a power cut."""
    place.mkdir()
    for number in numbers:
        (place / str(number)).mkdir()
    (place / SHARED).touch()
    for path in (place / SHARED, *map(place.joinpath, map(str, numbers)), place, place.parent):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class _Open:
    """A file that stays open, and what it holds that is not acknowledged."""

    path: str
    descriptor: int
    size: int = 0
    pending: list[int] = field(default_factory=list)


class Writer:
    """One of them. What fails is never acknowledged, and its file not used again."""

    def __init__(self, place: Path, number: int, notes: int, chance: random.Random) -> None:
        self._place, self._number, self._notes, self._chance = place, number, notes, chance
        self._sequence = 0
        self._open: dict[str, _Open] = {}
        self._made: deque[str] = deque()
        self._trees: deque[Sequence[str]] = deque()

    def run(self, pause: float) -> None:
        """Until the process is killed."""
        ways: Sequence[Callable[[], None]] = (
            self._append,
            self._create,
            self._rename,
            self._rename,  # twice: it is how most programs replace a file
            self._replace,
            self._share,
            self._make_some,
            self._make_tree,
        )
        while True:
            try:
                way = self._look if self._chance.random() < _LOOKS else self._chance.choice(ways)
                way()
                time.sleep(self._chance.uniform(0, 2 * pause))
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise
                self._leave_all()
                time.sleep(_PAUSE)

    def _append(self) -> None:
        """To a file of its own, which is left when it is large."""
        file = self._open.get("append") or self._new("append")
        self._write(file, self._size(), file.size)
        self._maybe_sync(file, 0.5)
        if file.size > _ROLL:
            self._leave("append")

    def _create(self) -> None:
        """A file of one record, or an empty one: it is synced, its directory, both or neither."""
        file = self._new("create")
        by_file, by_directory = self._chance.choice(
            ((True, True), (True, False), (False, True), (False, False))
        )
        size = self._perhaps(self._size())
        self._write(file, size, 0, How.PLACED if size and (by_file or not by_directory) else How.NAMED)
        if by_file:
            self._chance.choice((os.fsync, os.fdatasync))(file.descriptor)
        if by_directory:
            self._sync_directory()
        if by_file or by_directory:
            self._acknowledge(file.pending)
        self._leave("create")

    def _make_some(self) -> None:
        """Small files, one after the other, of which the directory is synced; some are removed at once."""
        pending = list[int]()
        for _ in range(self._chance.randint(1, _MOST_AT_ONCE)):
            size = self._perhaps(self._chance.randint(records.SMALLEST, 900))
            write = Write(self._record(size), How.NAMED, self._next("some"))
            self._note(records.note_write(write))
            _make(self._place / write.path, write.record.pack())
            pending.append(write.record.sequence)
            if self._chance.random() < 0.4:
                pending[-1] = self._remove(write.path)
            else:
                self._made.append(write.path)
        if self._chance.random() < 0.7:
            self._sync_directory()
            self._acknowledge(pending)
        while len(self._made) > _FILES:
            self._remove_oldest()

    def _make_tree(self) -> None:
        """Directories in each other, a file at the bottom: made elsewhere, and moved when all is synced."""
        fresh, tree = f"{self._number}/fresh-tree", self._next("tree")
        below = [fresh, *map(str, range(self._chance.randint(1, _DEEPEST)))]
        write = Write(self._record(self._size()), How.PLACED, "/".join((tree, *below[1:], "file")))
        self._note(records.note_write(write))
        shutil.rmtree(self._place / fresh, ignore_errors=True)  # of one that failed
        _fill([self._place / "/".join(below[:depth]) for depth in range(1, len(below) + 1)], write.record)
        (self._place / fresh).rename(self._place / tree)
        self._trees.append((tree, write.path))
        if self._chance.random() < 0.7:
            self._sync_directory()
            self._acknowledge([write.record.sequence])
        if len(self._trees) > _TREES:
            self._remove_tree(*self._trees.popleft())

    def _remove_tree(self, tree: str, path: str) -> None:
        """First the file, then all directories."""
        removed = self._remove(path)
        with contextlib.suppress(FileNotFoundError):  # a power cut took it
            shutil.rmtree(self._place / tree)
        self._maybe_sync_removal(removed)

    def _look(self) -> None:
        """At all that is in another writer's directory."""
        with contextlib.suppress(FileNotFoundError):  # he goes on
            for path in self._chance.choice(sorted(self._place.iterdir())).glob("*"):
                path.stat()

    def _rename(self) -> None:
        """A file of one record is synced and takes the name of one before it."""
        target = f"{self._number}/current-{self._chance.randrange(3)}"
        write = Write(self._record(self._size()), How.RENAMED, target)
        fresh = self._place / str(self._number) / "fresh"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(descriptor, write.record.pack())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._note(records.note_write(write))
        fresh.rename(self._place / target)
        if self._chance.random() < 0.7:
            self._sync_directory()
            self._acknowledge([write.record.sequence])

    def _replace(self) -> None:
        """A record in the place of another of its size."""
        size = self._chance.choice(list(_SLOTS))
        key = f"slots-{size}"
        file = self._open.get(key) or self._new(key)
        offset = self._chance.randrange(_SLOTS[size]) * size
        os.lseek(file.descriptor, offset, os.SEEK_SET)
        self._write(file, size, offset)
        self._maybe_sync(file, 0.5)

    def _share(self) -> None:
        """To the end of a file to which all writers append. Small: a larger one is several requests."""
        if SHARED not in self._open:
            descriptor = os.open(self._place / SHARED, os.O_WRONLY | os.O_APPEND)
            self._open[SHARED] = _Open(SHARED, descriptor)
        file = self._open[SHARED]
        self._write(file, self._chance.randint(records.SMALLEST, 6000), 0, How.APPENDED)
        self._maybe_sync(file, 0.5)

    def _size(self) -> int:
        low, high = self._chance.choice(((records.SMALLEST, 900), (901, 16_000), (16_001, 256 << 10)))
        if self._chance.random() < 0.15:
            low, high = (1 << 20) + 1, LARGEST
        return self._chance.randint(low, high)

    def _perhaps(self, size: int) -> int:
        """Or nothing: with the first byte of a file its name is no longer kept back."""
        return size if self._chance.random() < 0.5 else 0

    def _record(self, size: int) -> Record:
        self._sequence += 1
        return Record(self._number, self._sequence, size)

    def _new(self, key: str) -> _Open:
        """An open file with a new name, in the place of the oldest."""
        path = self._next(key)
        descriptor = os.open(self._place / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._open[key] = _Open(path, descriptor)
        self._made.append(path)
        if key != "create":
            self._sync_directory()
        if len(self._made) > _FILES:
            self._remove_oldest()
        return self._open[key]

    def _next(self, key: str) -> str:
        """A name that was never there."""
        return f"{self._number}/{key}-{self._sequence}"

    def _remove_oldest(self) -> None:
        used = {file.path for file in self._open.values()}
        path = next(path for path in self._made if path not in used)
        self._made.remove(path)
        self._maybe_sync_removal(self._remove(path))

    def _remove(self, path: str) -> int:
        """The number of the removal."""
        write = Write(self._record(0), How.REMOVED, path)
        self._note(records.note_write(write))
        with contextlib.suppress(FileNotFoundError):  # never came to be, or a power cut took it
            (self._place / path).unlink()
        return write.record.sequence

    def _maybe_sync_removal(self, number: int) -> None:
        if self._chance.random() < 0.5:
            self._sync_directory()
            self._acknowledge([number])

    def _write(self, file: _Open, size: int, offset: int, how: How = How.PLACED) -> None:
        write = Write(self._record(size), how, file.path, offset)
        self._note(records.note_write(write))
        _write_all(file.descriptor, write.record.pack())
        file.size += size
        file.pending.append(write.record.sequence)

    def _maybe_sync(self, file: _Open, chance: float) -> None:
        if self._chance.random() < chance:
            os.fsync(file.descriptor)
            self._acknowledge(file.pending)

    def _acknowledge(self, pending: list[int]) -> None:
        self._note(records.note_acknowledged(time.monotonic(), pending))
        pending.clear()

    def _sync_directory(self) -> None:
        _sync(self._place / str(self._number))

    def _note(self, line: str) -> None:
        os.write(self._notes, line.encode())

    def _leave(self, key: str) -> None:
        os.close(self._open.pop(key).descriptor)

    def _leave_all(self) -> None:
        for key in list(self._open):
            with contextlib.suppress(OSError):  # the mount may be gone
                self._leave(key)


def _fill(directories: Sequence[Path], record: Record) -> None:
    """Make these, of which each lies in the one before, and a file in the last; all synced."""
    for directory in directories:
        directory.mkdir()
    _make(directories[-1] / "file", record.pack(), sync=True)
    for directory in reversed(directories):
        _sync(directory)


def _make(path: Path, data: bytes, *, sync: bool = False) -> None:
    """A file that was not there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
