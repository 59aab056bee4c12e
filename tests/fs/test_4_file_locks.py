# SPDX-License-Identifier: Apache-2.0
"""Programs that lock files, on the host and on the device at once: flock, and fcntl's ranges."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ..effort import scaled
from ..waiting import eventually
from .conftest import mounted
from .support import errno_of, lasts
from .world import World

LEASE = scaled(quick=1.0, full=2.0)


def sides(world: World, turned: bool) -> tuple[Path, Path]:
    """Where who is first sees the public part, and where the other one does."""
    os.umask(0)
    parts = (world.device / "public", world.host / "public")
    (parts[0] / "f").write_bytes(bytes(100))
    return parts[::-1] if turned else parts


class Program:
    """A process that has a file open, takes a lock, says so, and holds it until it is told to end."""

    def __init__(self, path: Path, take: Callable[[int], None]) -> None:
        told, telling = os.pipe()
        going, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._be(path, take, telling, going)
        os.close(telling)
        os.close(going)
        self._told = told
        assert os.read(told, 1) == b"?"

    def _be(self, path: Path, take: Callable[[int], None], telling: int, going: int) -> None:
        code = 0
        try:
            descriptor = os.open(path, os.O_RDWR)
            os.write(telling, b"?")
            take(descriptor)
            os.write(telling, b"!")
            os.read(going, 1)
            os.close(descriptor)
        except InterruptedError:
            code = errno.EINTR
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)

    @property
    def has_it(self) -> bool:
        os.set_blocking(self._told, False)
        try:
            return os.read(self._told, 1) == b"!"
        except BlockingIOError:
            return False

    def await_it(self) -> None:
        os.set_blocking(self._told, True)
        assert os.read(self._told, 1) == b"!"

    def go(self) -> None:
        """It closes its file."""
        with contextlib.suppress(OSError):
            os.write(self._go, b".")

    def end(self) -> int:
        """Its exit status."""
        self.go()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.end()


def whole(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def a_range(descriptor: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_EX, 10, 5)


def part(descriptor: int, how: int) -> None:
    """Of that range."""
    fcntl.lockf(descriptor, how, 1, 14)


def is_locked(path: Path, take: Callable[[int, int], None]) -> bool:
    """For another process, now."""
    with path.open("r+b") as file:
        try:
            take(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


BOTH_WAYS = pytest.mark.parametrize("turned", [False, True], ids=["device-first", "host-first"])
FAMILIES = pytest.mark.parametrize(
    ("take", "look"),
    [(whole, fcntl.flock), (a_range, part)],
    ids=["flock", "fcntl"],
)


@BOTH_WAYS
@FAMILIES
@mounted()
def test_a_waiter_gets_the_lock_when_its_holder_closes_or_dies(
    world: World, turned: bool, take: Callable[[int], None], look: Callable[[int, int], None]
) -> None:
    here, there = sides(world, turned)
    for ends in (Program.end, Program.kill):
        first = Program(here / "f", take)
        first.await_it()
        assert is_locked(there / "f", look) and is_locked(here / "f", look)
        waiting = Program(there / "f", take)
        assert is_locked(there / "f", look) and not waiting.has_it
        ends(first)
        waiting.await_it()
        assert is_locked(here / "f", look)
        assert waiting.end() == 0
        eventually(
            lambda: not is_locked(here / "f", look) and not is_locked(there / "f", look),
            "nobody has a lock",
        )


def _woken(*_: object) -> None:
    raise InterruptedError(errno.EINTR, "a signal")


def interrupted(take: Callable[[int], None]) -> Callable[[int], None]:
    """It gets a signal while it waits, and again if that was too early."""

    def taken(descriptor: int) -> None:
        signal.signal(signal.SIGALRM, _woken)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        take(descriptor)

    return taken


@BOTH_WAYS
@FAMILIES
@mounted()
def test_a_signal_ends_the_waiting(
    world: World, turned: bool, take: Callable[[int], None], look: Callable[[int, int], None]
) -> None:
    here, there = sides(world, turned)
    first = Program(here / "f", take)
    first.await_it()
    waiting, killed = Program(there / "f", interrupted(take)), Program(there / "f", take)
    assert waiting.end() == errno.EINTR
    killed.kill()
    first.end()
    eventually(
        lambda: not is_locked(there / "f", look) and not is_locked(here / "f", look), "nobody has a lock"
    )


def ranged(kind: int, start: int, length: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)


@BOTH_WAYS
@mounted()
def test_the_holder_of_a_range_is_told_until_it_closes_the_file(world: World, turned: bool) -> None:
    def found(path: Path, start: int) -> tuple[int, ...]:
        with path.open("r+b") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, ranged(fcntl.F_RDLCK, start, 0))
        return struct.unpack("hhqqi4x", answer)

    here, there = sides(world, turned)
    holder = Program(here / "f", a_range)
    holder.await_it()
    assert found(there / "f", 0) == (fcntl.F_WRLCK, os.SEEK_SET, 5, 10, 0)
    assert found(here / "f", 0) == (fcntl.F_WRLCK, os.SEEK_SET, 5, 10, holder.pid)
    with (there / "f").open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 20)
        assert found(here / "f", 16)[2:4] == (20, 10)
        with (there / "f").open("rb"):
            pass  # and all are gone: as POSIX wants it
        assert found(here / "f", 16)[0] == fcntl.F_UNLCK
    assert holder.end() == 0


@BOTH_WAYS
@mounted()
def test_a_lock_of_an_open_file_description_ends_with_its_last_close(world: World, turned: bool) -> None:
    """F_OFD_SETLK, as emulators lock the images of disks: the kernel unlocks it for no FUSE mount."""
    here, there = sides(world, turned)
    one = os.open(here / "f", os.O_RDWR)
    fcntl.fcntl(one, fcntl.F_OFD_SETLK, ranged(fcntl.F_WRLCK, 0, 0))
    with (there / "f").open("r+b") as other:

        def lock() -> int | None:
            return errno_of(fcntl.lockf, other, fcntl.LOCK_EX | fcntl.LOCK_NB)

        os.close(os.dup(one))
        (here / "f").read_bytes()
        assert lock() == errno.EAGAIN
        os.close(one)
        eventually(lambda: lock() is None, "the lock is free")


@mounted()
def test_a_slow_unlock_loses_no_other_lock(world: World) -> None:
    here, there = sides(world, turned=False)
    (here / "g").write_bytes(bytes(100))
    holding, closing = Program(here / "f", a_range), Program(here / "g", a_range)
    for each in (holding, closing):
        each.await_it()
    waiting = Program(there / "f", a_range)
    os.kill(world.server_pid, signal.SIGSTOP)
    closing.go()
    time.sleep(0.6)  # for longer than a thread that must not wait would
    os.kill(world.server_pid, signal.SIGCONT)
    assert closing.end() == 0
    eventually(lambda: not is_locked(there / "g", part), "the lock is free")
    assert lasts(lambda: not waiting.has_it, 2.0)
    assert holding.end() == 0
    waiting.await_it()
    assert waiting.end() == 0


@mounted(lease=LEASE)
def test_a_host_that_stands_still_loses_its_locks_to_who_wants_them(world: World) -> None:
    """And is told so: nothing that relied on a lost lock is written."""
    here, there = sides(world, turned=False)
    file = (there / "f").open("r+b", buffering=0)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.kill(world.host_pid, signal.SIGSTOP)
    with (here / "f").open("r+b") as taking:
        fcntl.flock(taking, fcntl.LOCK_EX)
        os.kill(world.host_pid, signal.SIGCONT)
        eventually(lambda: errno_of(file.write, b"x") == errno.EIO, "a write under a lost lock fails")
        assert errno_of(fcntl.flock, file, fcntl.LOCK_EX) == errno.EIO
    file.close()

    def written() -> bool:  # anew each time: the lease is brief enough to be lost in between
        with (there / "f").open("r+b", buffering=0) as again:
            return errno_of(fcntl.flock, again, fcntl.LOCK_EX) is errno_of(again.write, b"x") is None

    eventually(written, "the lock is free")
