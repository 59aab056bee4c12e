# SPDX-License-Identifier: Apache-2.0
"""Both sides at once, at full speed: no read is older than the other's last completed operation."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import struct
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from ..effort import scaled
from .conftest import mounted
from .test_4_coherence import append
from .test_4_model import look_at_all
from .world import World

SECONDS = scaled(quick=0.4, full=1.5)
FEW = 5
"""Writes, and looks, that there must be more of, however long they take."""
_NUMBER = struct.Struct("=Q")
_PAGE = 4096


class Acknowledged:
    """The last number whose writing has returned, for all processes."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _PAGE)

    @property
    def number(self) -> int:
        return int(_NUMBER.unpack_from(self._memory)[0])

    @number.setter
    def number(self, number: int) -> None:
        _NUMBER.pack_into(self._memory, 0, number)

    @property
    def is_over(self) -> bool:
        """Whether the writer is to end: in a place of its own, which the writer never writes."""
        return self._memory[_PAGE // 2] != 0

    def end(self) -> None:
        """Have the writer end."""
        self._memory[_PAGE // 2] = 1


def block(number: int) -> bytes:
    return b"%8d" % number * (_PAGE // 8)


class Overwriting:
    """In one file that stays open, without any change of its size."""

    def __init__(self, top: Path) -> None:
        self.path = top / "f"
        self._file = -1

    def write(self, number: int) -> None:
        if self._file < 0:
            self._file = os.open(self.path, os.O_WRONLY)
        os.pwrite(self._file, block(number), 0)

    def read(self) -> int:
        return int(self.path.read_bytes()[:8])


class Reopening(Overwriting):
    """The file is opened for each write."""

    def write(self, number: int) -> None:
        with self.path.open("r+b", buffering=0) as file:
            file.write(block(number))


class HeldOpen(Reopening):
    """By who reads, as well."""

    def read(self) -> int:
        if self._file < 0:
            self._file = os.open(self.path, os.O_RDONLY)
        return int(os.pread(self._file, _PAGE, 0)[:8])


class Mapped(Reopening):
    """Read by a mapping; there can be none (ENODEV) while the device's kernel writes the file itself."""

    _view: mmap.mmap | None = None

    def read(self) -> int:
        while self._view is None:
            with self.path.open("rb") as file, contextlib.suppress(OSError):
                self._view = mmap.mmap(file.fileno(), _PAGE, mmap.MAP_SHARED, mmap.PROT_READ)
        return int(self._view[:8])


class Resizing(Overwriting):
    """The number is the size."""

    def write(self, number: int) -> None:
        os.truncate(self.path, number)

    def read(self) -> int:
        return self.path.stat().st_size


class Appending(Resizing):
    """The number is how many bytes were appended."""

    def write(self, number: int) -> None:
        size = self.path.stat().st_size
        with self.path.open("ab", buffering=0) as file:
            file.write(b"x" * (number + _PAGE - size))

    def read(self) -> int:
        return len(self.path.read_bytes()) - _PAGE


class Replacing(Overwriting):
    """By a new file that takes the name."""

    def write(self, number: int) -> None:
        new = self.path.with_name("new")
        new.write_bytes(block(number))
        new.rename(self.path)


class Renaming(Overwriting):
    """The number is in the name; read by a listing."""

    def write(self, number: int) -> None:
        (self.path.parent / f"n{number - 1}").rename(self.path.parent / f"n{number}")

    def read(self) -> int:
        found: list[str] = []
        while not found:  # a listing under way may have neither of a rename's names, or both
            found = [name for name in os.listdir(self.path.parent) if name.startswith("n")]  # noqa: PTH208
        return max(int(name[1:]) for name in found)


class Touching(Overwriting):
    """The number is in the mode and the times."""

    def write(self, number: int) -> None:
        os.utime(self.path, ns=(number, number))

    def read(self) -> int:
        return self.path.stat().st_mtime_ns


KINDS = [
    Overwriting, Reopening, HeldOpen, Mapped, Resizing, Appending, Replacing, Renaming, Touching
]  # fmt: skip


@pytest.mark.parametrize("writer", ["device", "host"])
@pytest.mark.parametrize("kind", KINDS)
@mounted()
def test_the_next_operation_sees_it(world: World, kind: type[Overwriting], writer: str) -> None:
    def write(writing: Overwriting, done: Acknowledged) -> int:
        number = 1
        while not done.is_over:
            writing.write(number)
            done.number = number
            number += 1
        return 0

    os.umask(0)
    sides = {side: getattr(world, side) / "public" for side in ("device", "host")}
    (sides[writer] / "f").write_bytes(block(0))
    (sides[writer] / "n0").touch()
    done = Acknowledged()
    pid = os.fork()
    if pid == 0:
        os._exit(write(kind(sides[writer]), done))
    reading = kind(sides["host" if writer == "device" else "device"])
    end, count = time.monotonic() + SECONDS, 0
    try:
        while time.monotonic() < end or count <= FEW or done.number <= FEW:
            before = done.number
            found = reading.read()
            assert found >= before, f"{found} after {before}, in the {count}th look"
            count += 1
    finally:
        done.end()
        status = os.waitpid(pid, 0)[1]
    assert status == 0


NAMES = ("a", "b", "c", "d", "d/a", "d/b", "e", "e/a")
_EXPECTED = {
    errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EINVAL, errno.EPERM,
    errno.ESTALE,  # the kernel cannot take over a directory that was moved elsewhere while others move here
}  # fmt: skip


def anything(top: Path, dice: random.Random) -> None:
    """One operation, whatever comes of it."""
    one, other = (top / dice.choice(NAMES) for _ in range(2))
    calls: list[Callable[[], object]] = [
        lambda: one.write_bytes(dice.randbytes(dice.randrange(9000))),
        lambda: one.read_bytes(),
        lambda: one.stat(),
        lambda: os.listdir(one),  # noqa: PTH208
        lambda: one.rename(other),
        lambda: one.unlink(),
        lambda: one.mkdir(),
        lambda: one.rmdir(),
        lambda: one.hardlink_to(other),
        lambda: os.truncate(one, dice.randrange(9000)),
        lambda: append(one, b"appended"),
        lambda: one.chmod(dice.choice((0o666, 0o777))),
    ]
    try:
        dice.choice(calls)()
    except OSError as error:
        if error.errno not in _EXPECTED:
            raise


@mounted(server_uid=0, lease=60.0, timeout=60.0)  # much longer than any operation takes on a slow machine
def test_many_at_once_leave_the_same_behind(world: World) -> None:
    def work(top: Path, dice: random.Random) -> int:
        end = time.monotonic() + 4 * SECONDS
        try:
            while time.monotonic() < end:
                start = time.monotonic()
                anything(top, dice)
                assert time.monotonic() - start < world.lease, "somebody was waited for in vain"
        except BaseException:  # noqa: BLE001 - shown, and the exit code tells
            traceback.print_exc()
            return 1
        return 0

    os.umask(0)
    tops = [world.device / "public", world.host / "public"]
    processes = []
    for number in range(6):
        pid = os.fork()
        if pid == 0:
            os._exit(work(tops[number % 2], random.Random(number)))
        processes.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in processes] == [0] * len(processes)
    device, host = map(look_at_all, tops)
    assert host == device
