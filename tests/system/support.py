"""What the system tests share: emulated fleets as real processes, and the command line as a user types it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from millpond.base.errors import MillpondError
from millpond.host.api.daemon import DeviceInfo, JobInfo
from millpond.host.client import DaemonClient
from millpond.host.emulation.demo import data
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import Fleet, read
from millpond.host.model.jobs import Round
from millpond.train.job import file

T = TypeVar("T")
MILLPOND = (sys.executable, "-m", "millpond.host.main")
EXAMPLES = Path(__file__).parents[2] / "agent" / "examples"
CANARY = "canary-of-the-system-tests"
TRACER = "tracer-of-the-system-tests"
START_SECONDS = 90.0

# A model whose training takes as long as a test wants, without using the processor: a tenth of a second for
# each batch while training, until the file 'hurry' appears in the public part of the device's volume.
SLOW_MODEL = """\
import time
from pathlib import Path

from torch import nn


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images):
        if self.training and not Path("/volume/public/hurry").exists():
            time.sleep(0.1)
        return self.layers(images)


def build():
    return Slow()
"""

JOB = """\
name = "{name}"
seed = 3

[data]
private = "{private}"
test = "test"

[model]
factory = "{factory}"
files = {files}

[train]
batch = 64

[federated]
rounds = {rounds}
"""


def why_not() -> str | None:
    """Why this machine cannot emulate a fleet, in one line; None if it can."""
    for device in ("/dev/fuse", "/dev/net/tun"):
        try:
            os.close(os.open(device, os.O_RDWR))
        except OSError as error:
            return f"{device} is not usable: {error.strerror}"
    if not os.access("/usr/sbin/sshd", os.X_OK):
        return "there is no /usr/sbin/sshd"
    if subprocess.run([*unshare(), "true"], capture_output=True, check=False).returncode:
        return "this user can make no namespaces"
    return None


def unshare() -> tuple[str, ...]:
    """The command that gives what it runs mounts of its own."""
    return ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-Urm")


def eventually(condition: Callable[[], T | None], what: str, seconds: float = 30.0, every: float = 0.1) -> T:
    """The first value of ``condition`` that is true. Fails when there is none in time."""
    end = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(every)


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


def millpond(*arguments: str | Path, stdin: str = "", timeout: float = 90.0) -> Result:
    """Run a ``millpond`` command without a terminal."""
    argv = [*MILLPOND, *map(str, arguments)]
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


def write_data(fleet: Fleet, base: Path) -> None:
    """Digits as in the demo, and on csd1 two folders of samples that are no good for training."""
    names = [device.name for device in fleet.config.device]
    division = data.divide(data.load(), max(len(names), 2), 7)
    data.write(base / "test", division.test)
    marks = {"canaries": {"private": CANARY}, "tracers": {"public": TRACER}}
    for name, private, public in zip(names, division.private, division.public, strict=False):
        flash = fleet.device_directory(name) / "flash"
        data.write(flash / "private" / "digits", private, CANARY)
        data.write(flash / "public" / "digits", public)
        (flash / "private").chmod(0o700)
        (flash / "public" / "README.txt").write_text(f"Anyone may read this: {TRACER}\n")
        provisioning.write_agent_config(fleet, name, marks)
        for folder, value in (("poison", np.nan), ("huge", 3e38)):
            images = private.images.astype(np.float32) / 255
            if name == "csd1":
                images[:] = value
            _write_floats(flash / "private" / folder, images, private.labels)


def _write_floats(folder: Path, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> None:
    folder.mkdir()
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)


@dataclass
class Emulation:
    """A fleet, switched on as ``millpond emulate`` does it, in a session of its own."""

    base: Path
    process: subprocess.Popen[bytes] | None = None
    _seen: set[psutil.Process] = field(default_factory=set)

    @property
    def directory(self) -> Path:
        """The fleet's directory."""
        return self.base / "fleet"

    @property
    def fleet(self) -> Fleet:
        """The fleet, read again."""
        return read(self.directory)

    def start(self) -> None:
        """Switch it on; returns at once."""
        argv = [*MILLPOND, "emulate", "--fleet", str(self.directory)]
        with (self.base / "emulate.log").open("ab") as output:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def stop(self, seconds: float = 30.0) -> list[psutil.Process]:
        """Ctrl-C, and whatever is left then is killed. Returns what was left."""
        if self.process is None:
            return []
        self.processes()
        try:
            os.killpg(self.process.pid, signal.SIGINT)
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.processes()
        finally:
            left = running(self._seen)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.kill()
            self.process.wait()
            self.process = None
        return left

    def processes(self) -> list[psutil.Process]:
        """All processes of the emulated machine now."""
        assert self.process
        found = descendants(self.process.pid)
        self._seen.update(found)
        return found

    def millpond(
        self, command: str, *arguments: str | Path, stdin: str = "", timeout: float = 90.0
    ) -> Result:
        """Run a command on this fleet."""
        return millpond(command, "--fleet", self.directory, *arguments, stdin=stdin, timeout=timeout)

    def client(self) -> DaemonClient:
        """A connection to the daemon."""
        return DaemonClient(self.directory)

    def devices(self) -> dict[str, DeviceInfo]:
        """The devices by name; none while no daemon answers."""
        try:
            with self.client() as client:
                return {device.name: device for device in client.devices()}
        except MillpondError:
            return {}

    def wait(self, states: dict[str, str], seconds: float = START_SECONDS) -> dict[str, DeviceInfo]:
        """Wait until the devices named are in their states."""
        last: dict[str, DeviceInfo] = {}

        def reached() -> dict[str, DeviceInfo] | None:
            last.clear()
            last.update(self.devices())
            assert self.process is not None, "the fleet is switched off"
            assert self.process.poll() is None, "the emulation has ended"
            return last if all(n in last and last[n].state == state for n, state in states.items()) else None

        try:
            return eventually(reached, f"{states}", seconds)
        except AssertionError as error:
            found = {name: (device.state, device.reason) for name, device in last.items()}
            raise AssertionError(f"{error}; found {found}; {self.logs()}") from None

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until all devices are ready."""
        self.wait({device.name: "ready" for device in self.fleet.config.device}, seconds)

    def logs(self) -> str:
        """The ends of all logs, for a failure's report."""
        paths = [
            self.base / "emulate.log",
            self.directory / "host.log",
            *self.directory.glob("devices/*/*.log"),
        ]
        return "\n".join(f"--- {path}\n{path.read_text()[-2000:]}" for path in paths if path.exists())

    def pid_one(self, device: str) -> psutil.Process:
        """The init of a board: when it dies, all of the board does."""
        return next(p for p in self.processes() if _hostname(p) == device and _innermost_pid(p) == 1)

    def agent(self, device: str) -> psutil.Process:
        """The main process of a device's agent."""
        inside = [p for p in self.processes() if _hostname(p) == device]
        return next(p for p in inside if _parent_pid(p) == 1)

    def daemon(self) -> psutil.Process:
        """The host daemon."""
        return next(p for p in self.processes() if _command(p)[1:4] == ["-m", "millpond.host.main", "host"])

    def submit(self, job_file: Path) -> int:
        """Start a job."""
        job, code = file.read(job_file)
        with self.client() as client:
            return client.submit(job, code)

    def progress(self, job: int) -> tuple[JobInfo, list[Round]]:
        """How far a job is."""
        with self.client() as client:
            for progress in client.watch(job):
                return progress.info, list(progress.rounds)
        raise AssertionError("no progress")

    def wait_for_rounds(self, job: int, count: int, seconds: float = 60.0) -> list[Round]:
        """Wait until a job has finished ``count`` rounds."""

        def enough() -> list[Round] | None:
            info, rounds = self.progress(job)
            assert info.state in ("running", "done"), f"{info.error}\n{self.logs()}"
            return rounds if len(rounds) >= count else None

        return eventually(enough, f"{count} rounds of job {job}", seconds)

    def wait_for_end(self, job: int, seconds: float = 90.0) -> tuple[JobInfo, list[Round]]:
        """Wait until a job has ended, also over a restart of the daemon."""

        def ended() -> tuple[JobInfo, list[Round]] | None:
            try:
                info, rounds = self.progress(job)
            except MillpondError:
                return None
            return (info, rounds) if info.state != "running" else None

        return eventually(ended, f"the end of job {job}", seconds)

    def write_job(
        self,
        name: str,
        *,
        code: str = SLOW_MODEL,
        factory: str = "model:build",
        private: str = "private/digits",
        rounds: int = 3,
    ) -> Path:
        """A job file, with the code of its model unless the factory is of millpond."""
        files = "[]" if factory.startswith("millpond.") else '["model.py"]'
        folder = self.base / "job-files" / name
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (folder / "test").symlink_to(self.base / "test")
        (folder / "model.py").write_text(code)
        text = JOB.format(name=name, private=private, factory=factory, files=files, rounds=rounds)
        (folder / "job.toml").write_text(text)
        return folder / "job.toml"

    @contextlib.contextmanager
    def hurrying(self) -> Iterator[Callable[[], None]]:
        """Call what this yields to have slow models hurry, until the end of the block."""
        flags = [
            self.fleet.device_directory(device.name) / "flash" / "public" / "hurry"
            for device in self.fleet.config.device
        ]

        def hurry() -> None:
            for flag in flags:
                flag.touch()

        try:
            yield hurry
        finally:
            for flag in flags:
                flag.unlink(missing_ok=True)


def create(base: Path, names: Iterable[str]) -> Emulation:
    """A fleet with data, switched off."""
    emulation = Emulation(base)
    fleet = provisioning.create(emulation.directory, "tests", list(names))
    write_data(fleet, base)
    for example in ("digits.toml", "mymodel.toml", "mymodel.py"):
        shutil.copy(EXAMPLES / example, base / example)
    return emulation


def name_agent(emulation: Emulation, device: str, script: Path, encrypt: str = "auto") -> None:
    """Have a device run ``script`` instead of the agent; it lies in the device's /etc/millpond."""
    shutil.copy(script, emulation.fleet.device_directory(device) / "etc" / "agent.py")
    path = emulation.directory / "fleet.toml"
    command = f'agent = ["{sys.executable}", "/etc/millpond/agent.py"]\nencrypt = "{encrypt}"'
    before = f'[[device]]\nname = "{device}"\n'
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, f"{before}{command}\n"))


def descendants(pid: int) -> list[psutil.Process]:
    """A process and all below it that are alive."""
    try:
        process = psutil.Process(pid)
        return running([process, *process.children(recursive=True)])
    except psutil.NoSuchProcess:
        return []


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that live, zombies not counted."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _hostname(process: psutil.Process) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/root/etc/hostname").read_text().strip()
    return ""


def _namespaced(process: psutil.Process, key: str) -> list[int]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith(key):
                return [int(number) for number in line.split()[1:]]
    return []


def _innermost_pid(process: psutil.Process) -> int:
    return (_namespaced(process, "NSpid:") or [0])[-1]


def _parent_pid(process: psutil.Process) -> int:
    """The pid of its parent, in the innermost namespace; 0 if the parent is outside."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        if parent and _hostname(parent) == _hostname(process) and "agent" in " ".join(_command(process)):
            return _innermost_pid(parent)
    return 0


def mounts_below(directory: Path) -> list[str]:
    """What is mounted below a directory, as this process sees it."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4].startswith(str(directory))]


def interfaces() -> set[str]:
    """The network interfaces of this machine that could be of millpond."""
    return {name for name in psutil.net_if_addrs() if name.startswith("mp")}


def receive_all(sock: socket.socket, seconds: float = 10.0) -> bytes:
    """Everything until the other end closes. Fails if it does not."""
    sock.settimeout(seconds)
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(4096):
            data += part
    return data
