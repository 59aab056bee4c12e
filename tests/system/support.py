# SPDX-License-Identifier: Apache-2.0
"""Support of the system tests: emulated fleets as real processes, and the command line as a user types it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tests.forking import CLI, Command, Result, server
from tests.waiting import eventually

from millpond.base.errors import MillpondError
from millpond.host.api.daemon import DeviceInfo, JobInfo
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.emulation.demo import data
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import NETWORK, Fleet, read
from millpond.host.records.jobs import ACTIVE, Round
from millpond.linux.syscalls import killed_with_parent
from millpond.train.job import file
from millpond.wire.control_messages import Ledger

from .processes import command, descendants, hostname, innermost_pid, parent_pid, running

MILLPOND = (sys.executable, "-m", "millpond.host.main")
EXAMPLES = Path(__file__).parents[2] / "agent" / "examples"
CANARY = "canary-of-the-system-tests"
TRACER = "tracer-of-the-system-tests"
WATTS = {"host": (60.0, 200.0), "csd0": (2.0, 7.5), "csd1": (3.0, 9.0), "csd2": (2.5, 8.0)}
"""Declared ones, idle and busy."""
MARKS = {"canaries": {"private": CANARY}, "tracers": {"public": TRACER}}
BAD = {"huge": {"csd1": 3e38}, "bad": {"csd1": np.nan, "csd2": 3e38}}
"""Folders in which all pixels of some devices have one value."""
START_SECONDS = 120.0
SILENCE = 10
"""Seconds, and half of them in jobs: on a busy machine, an agent or a tunnel may stand still for longer than
the default allows, and a job would do without a device that no test has touched.
"""
EVERY = 0.1  # to look at a fleet takes it some time, too

# A model whose training takes as long as a test wants, without using the processor: a tenth of a second for
# each batch, until it is told to hurry. Nor does it reach a target before it is told to finish.
SLOW_MODEL = """\
import time
from pathlib import Path

from torch import nn

FOLDERS = (Path("/volume/public"), Path("TEST"))


def told(word):
    return any((folder / word).exists() for folder in FOLDERS)


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images):
        if self.training and not told("hurry"):
            time.sleep(0.1)
        return self.layers(images) * (self.training or told("finish"))


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
quorum = {quorum}

[evaluate]
{target}
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


_PROGRESS = re.compile(r"^.+: .*[0-9]( s| min) (so far|left)\n", re.MULTILINE)


def millpond(*arguments: str | Path, stdin: str = "", timeout: float = 180.0) -> Result:
    """Run a ``millpond`` command without a terminal. Its ``err`` has no lines of progress."""
    result = server(CLI).run("millpond", *arguments, stdin=stdin, timeout=timeout)
    return replace(result, err=without_progress(result.err))


def without_progress(err: str) -> str:
    """Return it without the lines that say how far a command is, which come of a slow machine."""
    return _PROGRESS.sub("", err)


@dataclass(frozen=True)
class Trained:
    """A job that is done, and the devices' ledgers before and after it."""

    result: Result
    info: JobInfo
    rounds: list[Round]
    before: dict[str, Ledger]
    after: dict[str, Ledger]


def write_data(fleet: Fleet, base: Path) -> None:
    """Digits as in the demo, and folders in which some devices' samples are no good for training."""
    names = [device.name for device in fleet.config.device]
    division = data.divide(data.load(), max(len(names), 2), 7)
    data.write(base / "test", division.test)
    for name, private, public in zip(names, division.private, division.public, strict=False):
        flash = fleet.device_directory(name) / "flash"
        data.write(flash / "private" / "digits", private, CANARY)
        data.write(flash / "public" / "digits", public)
        (flash / "private").chmod(0o700)
        (flash / "public" / "README.txt").write_text(f"Anyone may read this: {TRACER}\n")
        provisioning.write_agent_config(fleet, name, MARKS)
        for folder, values in BAD.items():
            images = private.images.astype(np.float32) / 255
            if name in values:
                images[:] = values[name]
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
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=killed_with_parent(),  # a run that is broken off runs no fixture's end
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
        self, command: str, *arguments: str | Path, stdin: str = "", timeout: float = 180.0
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
            return eventually(reached, f"{states}", seconds, EVERY)
        except AssertionError as error:
            found = {name: (device.state, device.reason) for name, device in last.items()}
            raise AssertionError(f"{error}; found {found}; {self.logs()}") from None

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until all devices are ready, by the agents that answer now: one whose agent has just died
        passes for ready, also when the next agent answers already.
        """
        names = {device.name for device in self.fleet.config.device}
        end = time.monotonic() + seconds

        def answering() -> bool:
            found = self.wait(dict.fromkeys(names, "ready"), end - time.monotonic())
            greeted = {name: found[name].welcome for name in names}
            return all(one and self._boot(name) == one.boot for name, one in greeted.items())

        eventually(answering, f"answers of {', '.join(sorted(names))}", seconds, EVERY)

    def _boot(self, device: str) -> str:
        """Which agent answers on a device, "" if none does."""
        try:
            with self.client() as client:
                position = client.new_log(device, 0, None).position
                return position.boot if position else ""
        except MillpondError:
            return ""

    def logs(self) -> str:
        """The ends of all logs, for a failure's report."""
        paths = [
            self.base / "emulate.log",
            self.directory / "host.log",
            *self.directory.glob("devices/*/*.log"),
            *self.directory.glob("devices/*/flash/private/.millpond-logs/*.log"),
            *self.directory.glob("jobs/*/host.log"),
        ]
        return "\n".join(f"--- {path}\n{path.read_text()[-2000:]}" for path in paths if _size(path))

    def pid_one(self, device: str) -> psutil.Process:
        """The init of a board: when it dies, all of the board does."""
        return self._found(f"the init of {device}", lambda p: hostname(p) == device and innermost_pid(p) == 1)

    def agent(self, device: str) -> psutil.Process:
        """The main process of a device's agent."""
        return self._found(f"the agent of {device}", lambda p: hostname(p) == device and parent_pid(p) == 1)

    def daemon(self) -> psutil.Process:
        """The host daemon."""
        words = ["-m", "millpond.host.main", "host"]
        return self._found("the host daemon", lambda p: command(p)[1:4] == words)

    def _found(self, what: str, condition: Callable[[psutil.Process], bool]) -> psutil.Process:
        """The process of the emulated machine, as soon as there is one: it may be just starting."""
        return eventually(lambda: next(filter(condition, self.processes()), None), what, every=EVERY)

    def begin(self, command: str, *arguments: str | Path) -> Command:
        """Begin a command on this fleet; who calls it closes it."""
        return server(CLI).start("millpond", command, "--fleet", self.directory, *arguments)

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

    def wait_for_rounds(self, job: int, count: int, seconds: float = 120.0) -> list[Round]:
        """Wait until a job has finished ``count`` rounds."""

        def enough() -> list[Round] | None:
            info, rounds = self.progress(job)
            assert info.state in ("queued", "running", "done"), f"{info.error}\n{self.logs()}"
            return rounds if len(rounds) >= count else None

        return eventually(enough, f"{count} rounds of job {job}", seconds, EVERY)

    def wait_for_end(self, job: int, seconds: float = 180.0) -> tuple[JobInfo, list[Round]]:
        """Wait until a job has ended, also over a restart of the daemon."""

        def ended() -> tuple[JobInfo, list[Round]] | None:
            try:
                info, rounds = self.progress(job)
            except MillpondError:
                return None
            return (info, rounds) if info.state not in ACTIVE else None

        return eventually(ended, f"the end of job {job}", seconds, EVERY)

    def write_job(
        self,
        name: str,
        *,
        code: str = SLOW_MODEL,
        factory: str = "model:build",
        private: str = "private/digits",
        rounds: int = 3,
        quorum: float = 0.5,
        target: float | None = None,
    ) -> Path:
        """A job file, with the code of its model unless the factory is of millpond."""
        files = "[]" if factory.startswith("millpond.") else '["model.py"]'
        folder = self.base / "job-files" / name
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (folder / "test").symlink_to(self.base / "test")
        self.write_model(folder, code)
        text = JOB.format(
            name=name,
            private=private,
            factory=factory,
            files=files,
            rounds=rounds,
            quorum=quorum,
            target="" if target is None else f"target = {target}",
        )
        (folder / "job.toml").write_text(text)
        return folder / "job.toml"

    def write_model(self, folder: Path, code: str) -> None:
        """The code of a job's model, which knows where it may be told something."""
        (folder / "model.py").write_text(code.replace("TEST", str((self.base / "test").resolve())))

    @contextlib.contextmanager
    def pace(self) -> Iterator[Pace]:
        """Tell slow models to go faster, until the end of the block."""
        flash = [self.fleet.device_directory(device.name) / "flash" for device in self.fleet.config.device]
        pace = Pace([*(folder / "public" for folder in flash), self.base / "test"])
        try:
            yield pace
        finally:
            pace.slow_down()


@dataclass(frozen=True)
class Pace:
    """How fast models of SLOW_MODEL's train, wherever they do so."""

    folders: list[Path]

    def hurry(self) -> None:
        """Have them train as fast as they can."""
        for folder in self.folders:
            (folder / "hurry").touch()

    def finish(self) -> None:
        """The same, and have them reach their target in the next round."""
        (self.folders[-1] / "finish").touch()
        self.hurry()

    def slow_down(self) -> None:
        """Have them be as slow as at first."""
        for folder in self.folders:
            (folder / "hurry").unlink(missing_ok=True)
        (self.folders[-1] / "finish").unlink(missing_ok=True)


def create(
    base: Path, names: Iterable[str], *, lan: bool = False, network: str = NETWORK, peers: str = ""
) -> Emulation:
    """A fleet with data, switched off."""
    emulation = Emulation(base)
    fleet = provisioning.create(
        emulation.directory, "tests", list(names), lan=lan, network=network, peers=peers
    )
    settings = emulation.directory / "fleet.toml"
    settings.write_text(f"silence = {SILENCE}\n{settings.read_text()}")
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


def set_watts(emulation: Emulation, watts: dict[str, tuple[float, float]]) -> None:
    """Declare the watts of the host and of csd0 in the fleet's file, those of others on the devices."""
    path = emulation.directory / "fleet.toml"
    text = path.read_text()
    for name, (idle, busy) in watts.items():
        table = f"[watts]\nidle = {idle}\nbusy = {busy}\n"
        if name == "host":
            text = f"{text}\n{table}"
        elif name == "csd0":
            line = f'[[device]]\nname = "{name}"\n'
            assert line in text
            text = text.replace(line, f"{line}watts = {{ idle = {idle}, busy = {busy} }}\n")
        else:
            own = emulation.fleet.device_directory(name) / "etc" / "agent.toml"
            own.write_text(f"{own.read_text()}\n{table}")
    path.write_text(text)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def receive_all(sock: socket.socket, seconds: float = 10.0) -> bytes:
    """Everything until the other end closes. Fails if it does not."""
    sock.settimeout(seconds)
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(4096):
            data += part
    return data
