# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces, tunnel endpoints and traffic in them; all that a test starts ends with it."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from millpond.linux.confinement.sandbox import Sandbox, spawn
from millpond.linux.syscalls import CLONE_NEWNET, CLONE_NEWUSER
from millpond.tunnel.datapath import native
from millpond.tunnel.datapath.stats_shm import make_stats, map_stats

from ..effort import scaled
from ..waiting import eventually

TRAFFIC = Path(__file__).with_name("traffic.py")
HOST_ADDRESS, DEVICE_ADDRESS = "10.77.0.1", "10.77.0.2"
INTERFACE = "mp-test0"

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_libc = ctypes.CDLL(None, use_errno=True)


def each_with_itself() -> list[str]:
    """The engines of host and device, the same at both.

    A quick run has the one that users have: supervision and transports are the same code for both, and that
    both carry packets in the same way is tested where they are compared.
    """
    return scaled([_with_itself()], ["python-python", "c-c"])


def each_with_each(*mixed: str) -> list[str]:
    """All engines of host and device; a quick run has ``mixed`` besides one with itself."""
    return scaled([_with_itself(), *mixed], ["python-python", "c-c", "python-c", "c-python"])


def _with_itself() -> str:
    best = native.resolve("auto")
    return f"{best}-{best}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``engines`` where a test does not say which; not as the fixture's ``params``, for this module may
    be imported before the effort is chosen.
    """
    said = any(mark.args[0] == "engines" for mark in metafunc.definition.iter_markers("parametrize"))
    if "engines" in metafunc.fixturenames and not said:
        metafunc.parametrize("engines", each_with_itself(), indirect=True)


WITH_TARGET = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
"""The environment of programs, in which ``nvmet`` is found."""


class Program:
    """A child process whose output lines are collected."""

    def __init__(
        self,
        argv: list[str],
        enter: Callable[[], None],
        read: int | None = None,
        inherited: tuple[int, ...] = (),
    ) -> None:
        pass_fds = inherited if read is None else (*inherited, int(argv[-1]))
        self.errors: list[str] = []
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            argv,
            pass_fds=pass_fds,
            preexec_fn=enter,
            env=WITH_TARGET,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout and self.process.stderr
        status = self.process.stdout if read is None else os.fdopen(read)
        pairs = [(status, self.lines), (self.process.stderr, self.errors)]
        self._threads = [threading.Thread(target=self._collect, args=pair) for pair in pairs]
        for thread in self._threads:
            thread.start()

    def _collect(self, stream: Any, lines: list[str]) -> None:
        with stream:
            for line in stream:
                lines.append(line.rstrip("\n"))

    def says(self, text: str, seconds: float = 30) -> None:
        def said() -> bool:
            assert self.process.poll() is None or text in self.lines, self.errors
            return text in self.lines

        eventually(said, f"{self.process.args!r} saying {text!r}", seconds)

    def result(self, seconds: float = 60) -> str:
        assert self.process.wait(seconds) == 0, self.errors
        self.close()
        return self.lines[-1]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        for thread in self._threads:
            thread.join(10)
        assert self.process.stdout
        self.process.stdout.close()


class End(Program):
    """A tunnel end; ``counters`` is the memory file that it counts in, if it was given one."""

    def __init__(
        self, argv: list[str], enter: Callable[[], None], read: int, counters: int | None = None
    ) -> None:
        self._counts = () if counters is None else map_stats(counters)
        super().__init__(argv, enter, read, () if counters is None else (counters,))

    @property
    def story(self) -> str:
        """What it tells of its links and its packets, out and in, for the message of a failure."""
        counts = [stats.read() for stats in self._counts]
        return f"{self.process.args!r}: {self.lines[-4:]}, {counts}, {self.errors[-20:]}"

    @property
    def statuses(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(self.lines)]

    @property
    def status(self) -> dict[str, Any]:
        return json.loads(self.lines[-1]) if self.lines else {"state": "starting"}

    def wait_up(self, after: int = 0, seconds: float = 30) -> dict[str, Any]:
        """The status once it is up with a generation beyond ``after``."""

        def up() -> dict[str, Any] | None:
            assert self.process.poll() is None, self.errors
            status = self.status
            return status if status["state"] == "up" and status["generation"] > after else None

        found: dict[str, Any] = eventually(up, f"{self.process.args!r} up", seconds)
        return found

    def wait_begun(self) -> None:
        """Until it has its interface and waits for a peer."""
        eventually(lambda: self.lines, f"{self.process.args!r} begun")

    def wait_down(self, reason: str, seconds: float = 30) -> dict[str, Any]:
        def down() -> list[dict[str, Any]]:
            return [status for status in self.statuses if reason in status.get("reason", "")]

        found: list[dict[str, Any]] = eventually(down, f"{self.process.args!r} down: {reason}", seconds)
        return found[-1]

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        super().close()
        assert not [line for line in self.errors if "Traceback" in line or "Warning" in line], self.errors

    def pumps(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def counted_end(argv: list[str], enter: Callable[[], None]) -> End:
    """Start an endpoint, or a target, with descriptors for its status and its counters."""
    reader, writer = os.pipe()
    counters = make_stats()
    argv = [*argv, "--counters-fd", str(counters), "--status-fd", str(writer)]
    end = End(argv, enter, reader, counters)
    os.close(writer)
    os.close(counters)
    return end


class Namespace:
    """A network namespace, and a user namespace around it where that takes one."""

    def __init__(self, undo: ExitStack, engine: str = "auto", *, loopback: bool = False) -> None:
        self._undo, self.engine = undo, engine
        reader, writer = os.pipe()

        def hold() -> int:
            if loopback:
                _bring_loopback_up()
            os.write(writer, b"x")
            signal.pause()
            return 0

        self._pid = spawn(Sandbox(own_network=True), hold)
        os.close(writer)
        undo.callback(self._end)
        with os.fdopen(reader, "rb") as ready:
            assert ready.read(1) == b"x", "no network namespace"
        names = ("user", "net") if os.geteuid() else ("net",)
        self._handles = [os.open(f"/proc/{self._pid}/ns/{name}", os.O_RDONLY) for name in names]
        for handle in self._handles:
            undo.callback(os.close, handle)

    def _end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def enter(self) -> None:
        kinds = (CLONE_NEWUSER, CLONE_NEWNET)[-len(self._handles) :]
        for handle, kind in zip(self._handles, kinds, strict=True):
            if _libc.setns(handle, kind):
                raise OSError(ctypes.get_errno(), "setns")

    def program(self, *argv: str) -> Program:
        program = Program(list(argv), self.enter)
        self._undo.callback(program.close)
        return program

    def traffic(self, role: str, address: str, number: int) -> Program:
        return self.program(sys.executable, str(TRAFFIC), role, address, "7000", str(number))

    def end(self, role: str, path: Path, *options: str, interface: str = INTERFACE) -> End:
        address = HOST_ADDRESS if role == "host" else DEVICE_ADDRESS
        argv = [sys.executable, "-P", "-W", "error", "-m", "millpond.tunnel", role, "--socket", str(path)]
        argv += ["--interface", interface, "--address", f"{address}/30", "--engine", self.engine]
        end = counted_end([*argv, *options], self.enter)
        self._undo.callback(end.close)
        return end

    def counters(self, name: str = INTERFACE) -> tuple[int, int]:
        """Bytes that the interface received and sent."""
        table = Path(f"/proc/{self._pid}/net/dev").read_text().splitlines()
        fields = next(line for line in table if line.strip().startswith(name + ":")).split(":")[1].split()
        return int(fields[0]), int(fields[8])

    def interfaces(self) -> list[str]:
        table = Path(f"/proc/{self._pid}/net/dev").read_text().splitlines()[2:]
        return [line.split(":")[0].strip() for line in table]


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


class Pair:
    """The two sides of one tunnel."""

    def __init__(self, undo: ExitStack, path: Path, host_engine: str, device_engine: str) -> None:
        self.socket = path
        self.host_side = Namespace(undo, host_engine)
        self.device_side = Namespace(undo, device_engine)

    def start(self) -> tuple[End, End]:
        """Host end and device end, both up."""
        device = self.device_side.end("device", self.socket, "--name", "csd0")
        host = self.host_side.end("host", self.socket)
        host.wait_up()
        device.wait_up()
        return host, device


def _why_no_tunnel() -> str:
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun is not accessible"
    try:
        with ExitStack() as undo:
            probe = (
                "from millpond.tunnel.netdev.tun import Tun, Deadline; Tun('mp-probe', 12, Deadline.after(1))"
            )
            program = Namespace(undo).program(sys.executable, "-c", probe)
            return "" if program.process.wait(60) == 0 else "no TUN interface can be made here"
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        return f"no network namespace can be made here: {error}"


@pytest.fixture(scope="session")
def tun_works() -> None:
    if reason := _why_no_tunnel():
        pytest.skip(reason)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The engines of host and device; a test may ask for others than ``each_with_itself``."""
    host, device = request.param.split("-")
    if "c" in (host, device) and native.resolve("auto") != "c":
        pytest.skip("the C engine was not built: there was no C compiler")
    return host, device


@pytest.fixture
def pair(undo: ExitStack, tmp_path: Path, tun_works: None, engines: tuple[str, str]) -> Pair:
    return Pair(undo, tmp_path / "csd0.sock", *engines)
