# SPDX-License-Identifier: Apache-2.0
"""Several programs at once on one mount, each with a model of what it does, and files that all use."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.fs.mount.stats_socket import read_stats

from ..effort import scaled
from ..waiting import eventually
from .conftest import World
from .support import Doing, errno_of

WithBoth = Callable[..., None]
_THREADS, _STEPS = 8, scaled(quick=150, full=1500)
_RECORD = 100


class Program:
    """Random operations in a directory of its own, whose outcome ``files`` foretells, and on shared files."""

    def __init__(self, top: Path, number: int) -> None:
        self.top, self.number, self.random = top / str(number), number, random.Random(number)
        self.files: dict[str, bytes] = {}
        self.appended = 0
        self.log, self.counter = top / "log", top / "counter"
        self.top.mkdir()

    def run(self) -> None:
        seen = 0
        for _ in range(_STEPS):
            self.random.choice((self.write, self.write, self.read, self.look, self.rename, self.remove))()
            if self.random.random() < 0.1:
                self.append()
            now = int(self.counter.read_bytes() or b"0")
            assert now >= seen, "what was there is gone again"
            seen = now

    def _name(self) -> str:
        return self.random.choice("abcdefgh")

    def write(self) -> None:
        name, data = self._name(), os.urandom(self.random.choice((0, 1, 4096, 70_000)))
        with (self.top / name).open("wb", buffering=0) as file:
            assert file.write(data) == len(data)
            if self.random.random() < 0.2:
                os.fsync(file.fileno())
        self.files[name] = data

    def read(self) -> None:
        name = self._name()
        if name in self.files:
            assert (self.top / name).read_bytes() == self.files[name]
        else:
            assert not (self.top / name).exists()

    def look(self) -> None:
        assert sorted(os.listdir(self.top)) == sorted(self.files)  # noqa: PTH208
        for name, data in self.files.items():
            assert (self.top / name).stat().st_size == len(data)

    def rename(self) -> None:
        old, new = self._name(), self._name()
        if old in self.files:
            (self.top / old).rename(self.top / new)
            self.files[new] = self.files.pop(old)

    def remove(self) -> None:
        name = self._name()
        if name in self.files:
            (self.top / name).unlink()
            del self.files[name]

    def append(self) -> None:
        with self.log.open("ab", buffering=0) as file:
            assert file.write(b"%d" % self.number * _RECORD) == _RECORD
        self.appended += 1

    def check(self, top: Path) -> None:
        """The other side sees the same."""
        found = {path.name: path.read_bytes() for path in (top / str(self.number)).iterdir()}
        assert found == self.files


@pytest.mark.parametrize("side", ["host", "device"])
def test_many_programs_at_once(world: World, with_both: WithBoth, side: str) -> None:
    world.server_uid = 0

    def body() -> None:
        public = {name: getattr(world, name) / "public" for name in ("host", "device")}
        top = public[side]
        for name in ("log", "counter"):
            (top / name).touch()
        programs = [Program(top, number) for number in range(_THREADS)]
        over = threading.Event()
        running = [Doing(program.run) for program in programs]

        def count() -> None:
            number = 0
            with (public["device"] / "counter").open("r+b", buffering=0) as file:
                while not over.is_set():
                    number += 1
                    os.pwrite(file.fileno(), b"%08d" % number, 0)

        counting = Doing(count)
        for each in running:
            each.result(95)
        over.set()
        counting.result()
        for program in programs:
            for at in public.values():
                program.check(at)
        log = (top / "log").read_bytes()
        records = [log[start : start + _RECORD] for start in range(0, len(log), _RECORD)]
        for program in programs:
            assert records.count(b"%d" % program.number * _RECORD) == program.appended
        assert len(records) == sum(program.appended for program in programs)

    with_both(body)


def test_files_read_in_order_at_once(world: World, with_both: WithBoth) -> None:
    """Data that was read ahead for one is not overwritten by that of another before the kernel has it."""

    def body() -> None:
        size = scaled(quick=6, full=30) << 20
        data = [os.urandom(1 << 16) * (size >> 16) for _ in range(_THREADS)]
        for number, each in enumerate(data):
            (world.device / "public" / str(number)).write_bytes(each)

        def read(number: int) -> None:
            assert (world.host / "public" / str(number)).read_bytes() == data[number]

        for each in [Doing(read, number) for number in range(_THREADS)]:
            each.result(90)

    with_both(body)


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGKILL])
def test_a_signal_ends_a_program_that_waits_for_the_device(
    world: World, with_both: WithBoth, number: signal.Signals
) -> None:
    world.timeout = 1000.0

    def body() -> None:
        (world.device / "public" / "d").mkdir()
        assert errno_of(os.stat, world.host / "public" / "other") is not None
        os.kill(world.server_pid, signal.SIGSTOP)
        os.waitid(os.P_PID, world.server_pid, os.WSTOPPED | os.WNOWAIT)
        path = world.host / "public" / "d" / "not asked for yet"
        program = subprocess.Popen(["stat", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(
            lambda: (
                Path(f"/proc/{program.pid}/comm").read_text() == "stat\n"
                and Path(f"/proc/{program.pid}/stack").read_text().count("fuse")
            ),
            "it waits",
        )
        program.send_signal(number)
        begun = time.monotonic()
        assert program.wait(60) == -number
        assert time.monotonic() - begun < 12, "by the signal, not since the device is silent"
        os.kill(world.server_pid, signal.SIGCONT)
        assert errno_of(os.stat, path) is not None
        (world.host / "public" / "f").write_text("x")
        assert (world.device / "public" / "f").read_text() == "x"

    with_both(body)


@pytest.mark.serial
@pytest.mark.parametrize("timeout", [3.0, 1000.0])
def test_all_end_soon_after_the_device_has_stopped(
    world: World, with_both: WithBoth, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, and however long an operation may take while the device answers."""
    monkeypatch.setattr("millpond.fs.client.rpc_pool.SILENT_SECONDS", 3.0)
    world.timeout = timeout

    def body() -> None:
        (world.device / "public" / "d").mkdir()
        os.kill(world.server_pid, signal.SIGSTOP)
        os.waitid(os.P_PID, world.server_pid, os.WSTOPPED | os.WNOWAIT)
        begun = time.monotonic()
        looking = [
            Doing(errno_of, os.stat, world.host / "public" / "d" / str(number)) for number in range(20)
        ]
        assert {each.result(80) for each in looking} == {110}  # ETIMEDOUT
        assert time.monotonic() - begun < 4.0 + 2.0
        (mount,) = read_stats(world.numbers, "csd0")
        assert sum(of.get("ETIMEDOUT", 0) for of in mount.errors.values()) == 20
        assert sum(sum(took) for took in mount.operations.values()) >= 20
        os.kill(world.server_pid, signal.SIGCONT)
        assert errno_of(os.stat, world.host / "public" / "d" / "0") == 2

    with_both(body)
