# SPDX-License-Identifier: Apache-2.0
"""Any history of operations on both sides has the outcome that it would have in one plain directory.

Each operation is done on the device's mount or the host's, and in a directory beside the volume: results,
errors and all that is to be seen must be the same, whichever side looks.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millpond.fs.client import write_behind

from ..effort import scaled
from .conftest import mounted
from .support import below
from .test_4_coherence import clear, store
from .world import World

_HISTORIES, _STEPS = scaled(quick=15, full=80), 60
_LEASE = 60.0  # much longer than any operation takes on a slow machine
_OPTIONAL = (0, os.O_CREAT, os.O_CREAT | os.O_EXCL, os.O_TRUNC, os.O_CREAT | os.O_TRUNC, os.O_APPEND)

sides = st.sampled_from(["device", "host"])
paths = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "l"])
blocks = st.builds(lambda byte, size: byte * size, st.sampled_from([b"x", b"y", b"z"]), st.integers(1, 9000))
offsets = st.sampled_from([0, 1, 4095, 4096, 5000, 12288])
modes = st.sampled_from([0o600, 0o644, 0o755])
flags = st.builds(
    lambda how, more: how | more,
    st.sampled_from([os.O_RDONLY, os.O_WRONLY, os.O_RDWR]),
    st.sampled_from(_OPTIONAL),
)
numbers = st.integers(0, 9)


def outcome(call: Callable[..., object], *arguments: object) -> object:
    """What it returns, or how it fails; within less than a lease, as nobody is waited for in vain."""
    start = time.monotonic()
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    finally:
        assert time.monotonic() - start < _LEASE / 2


def look(path: Path) -> tuple[object, ...]:
    """All that is to be seen of a file, but for times."""
    status = path.lstat()
    facts = stat.filemode(status.st_mode), status.st_nlink
    if stat.S_ISDIR(status.st_mode):
        return *facts, sorted(os.listdir(path))  # noqa: PTH208
    if stat.S_ISLNK(status.st_mode):
        return *facts, os.readlink(path)  # noqa: PTH115
    return *facts, status.st_size, path.read_bytes()


def look_at_all(top: Path) -> dict[str, tuple[object, ...]]:
    return {str(path.relative_to(top)): look(path) for path in [top, *below(top)]}


def look_open(file: int) -> tuple[object, ...]:
    status = os.fstat(file)
    data = outcome(os.pread, file, 1 << 20, 0)
    return status.st_size, status.st_nlink, os.lseek(file, 0, os.SEEK_END), data


class Histories(RuleBasedStateMachine):
    """Of one volume, which lasts for all of them."""

    tops: dict[str, Path]

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, int, int]] = []

    @initialize()
    def begin(self) -> None:
        for side in ("device", "plain"):
            clear(self.tops[side])
        assert look_at_all(self.tops["host"]) == look_at_all(self.tops["plain"])

    def both(self, side: str, call: Callable[..., object], *arguments: Any) -> object:
        """Strings are paths."""

        def at(top: Path) -> object:
            return outcome(call, *(top / each if isinstance(each, str) else each for each in arguments))

        done, expected = at(self.tops[side]), at(self.tops["plain"])
        assert done == expected, f"on the {side}: {done}, not {expected}"
        return done

    @rule(side=sides, path=paths, data=blocks)
    def write(self, side: str, path: str, data: bytes) -> None:
        self.both(side, Path.write_bytes, path, data)

    @rule(side=sides, path=paths)
    def touch(self, side: str, path: str) -> None:
        self.both(side, Path.touch, path)

    @rule(side=sides, path=paths, data=blocks, offset=offsets)
    def write_at(self, side: str, path: str, data: bytes, offset: int) -> None:
        def does(path: Path) -> int:
            with path.open("r+b", buffering=0) as file:
                return os.pwrite(file.fileno(), data, offset)

        self.both(side, does, path)

    @rule(side=sides, path=paths, data=blocks)
    def append(self, side: str, path: str, data: bytes) -> None:
        def does(path: Path) -> int | None:
            with path.open("ab", buffering=0) as file:
                return file.write(data)

        self.both(side, does, path)

    @rule(side=sides, path=paths, data=blocks)
    def store(self, side: str, path: str, data: bytes) -> None:
        if self.tops[side].joinpath(path).is_file() and (self.tops[side] / path).stat().st_size >= len(data):
            done = outcome(store, self.tops[side] / path, data)
            if done != "ENODEV":  # as the other side writes it: then there can be no mapping
                assert done == outcome(store, self.tops["plain"] / path, data)

    @rule(side=sides, path=paths, size=offsets)
    def truncate(self, side: str, path: str, size: int) -> None:
        self.both(side, os.truncate, path, size)

    @rule(side=sides, old=paths, new=paths)
    def rename(self, side: str, old: str, new: str) -> None:
        self.both(side, os.rename, old, new)

    @rule(side=sides, old=paths, new=paths)
    def link(self, side: str, old: str, new: str) -> None:
        self.both(side, os.link, old, new)

    @rule(side=sides, path=paths)
    def unlink(self, side: str, path: str) -> None:
        self.both(side, os.unlink, path)

    @rule(side=sides, path=paths, mode=modes)
    def mkdir(self, side: str, path: str, mode: int) -> None:
        self.both(side, os.mkdir, path, mode)

    @rule(side=sides, path=paths)
    def rmdir(self, side: str, path: str) -> None:
        self.both(side, os.rmdir, path)

    @rule(side=sides, path=paths)
    def symlink(self, side: str, path: str) -> None:
        self.both(side, lambda at: at.symlink_to("a"), path)

    @rule(side=sides, path=paths, mode=modes)
    def chmod(self, side: str, path: str, mode: int) -> None:
        self.both(side, os.chmod, path, mode)

    @rule(side=sides, path=paths)
    def look(self, side: str, path: str) -> None:
        self.both(side, look, path)

    @rule(side=sides, path=paths, how=flags)
    @precondition(lambda self: len(self.open) < 6)
    def open_file(self, side: str, path: str, how: int) -> None:
        if self.tops[side].joinpath(path).is_dir() and not how & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return  # a directory can be opened, but not so read
        one, other = (outcome(os.open, self.tops[where] / path, how, 0o644) for where in (side, "plain"))
        if isinstance(one, int) and isinstance(other, int):
            self.open.append((side, one, other))
        else:
            assert one == other, f"on the {side}: {one}, not {other}"

    def of_open(self, number: int, call: Callable[..., object], *arguments: object) -> None:
        side, one, other = self.open[number % len(self.open)]
        done, expected = outcome(call, one, *arguments), outcome(call, other, *arguments)
        assert done == expected, f"on the {side}: {done}, not {expected}"

    @rule(side=sides, path=paths, data=blocks, looker=sides)
    @precondition(lambda self: len(self.open) < 6)
    def write_new(self, side: str, path: str, data: bytes, looker: str) -> None:
        """The file stays open: a host may keep back what it has written, until somebody looks."""
        count = len(self.open)
        self.open_file(side, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if len(self.open) > count:
            self.of_open(count, os.pwrite, data, 0)
            self.look(looker, path)

    @rule(number=numbers, data=blocks, offset=offsets)
    @precondition(lambda self: self.open)
    def write_open(self, number: int, data: bytes, offset: int) -> None:
        self.of_open(number, os.pwrite, data, offset)

    @rule(number=numbers, size=offsets)
    @precondition(lambda self: self.open)
    def truncate_open(self, number: int, size: int) -> None:
        self.of_open(number, os.ftruncate, size)

    @rule(number=numbers, size=st.integers(1, 9000), offset=offsets)
    @precondition(lambda self: self.open)
    def allocate_open(self, number: int, size: int, offset: int) -> None:
        self.of_open(number, os.posix_fallocate, offset, size)

    @rule(number=numbers)
    @precondition(lambda self: self.open)
    def close_file(self, number: int) -> None:
        for file in self.open.pop(number % len(self.open))[1:]:
            os.close(file)

    @rule()
    def look_at_open_files(self) -> None:
        for number in range(len(self.open)):
            self.of_open(number, look_open)

    @rule()
    def look_around(self) -> None:
        expected = look_at_all(self.tops["plain"])
        for side in ("host", "device"):
            assert look_at_all(self.tops[side]) == expected, f"on the {side}"

    def teardown(self) -> None:
        for _, *files in self.open:
            for file in files:
                os.close(file)


@pytest.fixture(params=["as it is", "behind"])
def histories(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many; the host may keep back for long what it writes to new files."""
    if request.param == "behind":
        monkeypatch.setattr(write_behind, "_TICK_SECONDS", _LEASE)
    return _HISTORIES


@mounted(server_uid=0, lease=_LEASE, timeout=_LEASE)  # who may do what is another matter
def test_any_history(world: World, histories: int) -> None:
    os.umask(0)
    plain = world.backing.with_name("plain")
    plain.mkdir()
    plain.chmod((world.device / "public").stat().st_mode)
    public = {side: getattr(world, side) / "public" for side in ("device", "host")}
    Histories.tops = {"plain": plain, **public}
    how = settings(
        max_examples=histories,
        stateful_step_count=_STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # to make a failure's history shorter would take minutes
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Histories, settings=how)
