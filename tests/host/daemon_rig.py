# SPDX-License-Identifier: Apache-2.0
"""A host daemon in this process whose jobs train nothing: real store, jobs, socket and commands."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millpond.base.errors import ConnectionLost
from millpond.host.api.daemon import JobInfo, TunnelInfo
from millpond.host.cli import app
from millpond.host.daemon.server import DaemonServer
from millpond.host.fleet import directory
from millpond.host.fleet.device import Device, DeviceStatus
from millpond.host.fleet.directory import DeviceConfig
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.fleet.registry import DeviceRegistry
from millpond.host.jobs import service as jobs_service
from millpond.host.jobs.context import JobContext, JobFailed, JobStopped
from millpond.host.jobs.service import JobService
from millpond.host.jobs.stage import JobStage
from millpond.host.launch.service import LaunchService
from millpond.host.records.jobs import JobRow, Round
from millpond.host.store.store import Store
from millpond.train.job.file_cache import FileCache
from millpond.tunnel.datapath.stats import PacketStats
from millpond.wire.control_messages import Ledger, Load, Welcome

from ..waiting import eventually
from .stored import jobs_of

DEVICES = ("csd0", "csd1", "csd2")
JOB = """
name = "{name}"
data = {{ private = "private/digits", test = "given" }}
model = {{ factory = "millpond.train.zoo.models:digits_cnn" }}
"""


class StandIn:
    """A trainer that waits until it is told how its job ends, or the job is stopped."""

    def __init__(self, row: JobRow, context: JobContext, stop: threading.Event) -> None:
        self.row, self.context, self.stop = row, context, stop
        self.log = logging.Logger(f"tests.job.{row.id}")
        self.end = threading.Event()
        self.stage = JobStage.TRAINING, 0.25
        self.failure: Exception | None = None

    def run(self) -> Path:
        self.log.info("begun with %s", ", ".join(self.context.devices))
        self.end.wait(60)
        if self.stop.is_set():
            self.log.warning("it goes on without csd0: Bad file descriptor")
            raise JobStopped("stopped")
        if self.failure:
            raise self.failure
        return Path("model.safetensors")

    def abort(self) -> None:
        self.end.set()


LEDGER = Ledger(
    {"parameters": 1000, "metrics": 10}, {"canary": 0}, 4096, {"agent": 110, "nodes": 900, "made up": 1}
)
WELCOME = Welcome("", "1", "boot", "x86_64", 4, 4 << 30, 8 << 30)
LOAD = Load(0.25, 1 << 30, 2 << 30, 41.0, (), 120.0, "declared")


def stand_in_device(config: DeviceConfig) -> Device:
    """Return a device that is ready, has a tunnel and a ledger, and no agent to dial."""

    def no_agent(*_arguments: object) -> None:
        raise ConnectionLost(f"{config.name}: no agent")

    welcome = dataclasses.replace(WELCOME, device=config.name)
    there, back = PacketStats(20, 3000), PacketStats(10, 1000, malformed=1)
    tunnel = TunnelInfo(config.name, "up", "", 1.0, 1, 65520, 64, 0, "c", "on", 2, there, back)
    return cast(
        Device,
        SimpleNamespace(
            name=config.name,
            config=config,
            status=DeviceStatus(DeviceState.READY, "", welcome, LOAD),
            tunnel=lambda: tunnel,
            control=lambda _deadline: nullcontext(SimpleNamespace(call=lambda *_arguments: LEDGER)),
            dial=no_agent,
            stop=bool,
        ),
    )


@dataclasses.dataclass
class Rig:
    """The daemon, its fleet's directory, and the trainers of jobs that have begun, by number."""

    directory: Path
    jobs: JobService
    store: Store
    begun: dict[int, StandIn]
    command: Callable[..., tuple[int, str, str]]
    server: DaemonServer
    devices: DeviceRegistry

    def set_device(self, name: str, **status: Any) -> None:
        """Change the status of a device."""
        device = cast(Any, self.devices.get(name))
        device.status = dataclasses.replace(device.status, **status)

    def write_job(self, name: str, text: str = "") -> Path:
        """Write a job file."""
        path = self.directory / f"{name}.toml"
        path.write_text(JOB.format(name=name) + text)
        return path

    def submit(self, *arguments: str, text: str = "") -> int:
        """Queue a job by the command line."""
        job_file = self.write_job(f"job{len(jobs_of(self.store)) + 1}", text)
        code, out, err = self.command("train", str(job_file), "--detach", *arguments)
        assert code == 0, err
        return int(out.split()[1])

    def finish(self, number: int, failure: str = "") -> None:
        """End a running job, and wait until that is stored."""
        self.begun[number].failure = JobFailed(failure) if failure else None
        self.begun[number].end.set()
        self.wait_for(number, "failed" if failure else "done")

    def wait_for(self, number: int, state: str) -> None:
        """Wait until a job has a state."""
        eventually(lambda: self.info(number).state == state, f"job {number} {state}", 20, 0.01)

    def wait_for_pruned(self, number: int) -> None:
        """Wait until the files of a job are gone."""
        folder = self.directory / "jobs" / str(number)
        eventually(
            lambda: self.info(number).pruned is not None and not folder.exists(), f"{number} pruned", 20, 0.01
        )

    def info(self, number: int) -> JobInfo:
        """Return a job as 'millpond jobs' has it."""
        return self.jobs.infos()[number - 1]

    @property
    def states(self) -> list[str]:
        """The state of all jobs, with what those wait for that do not run."""
        return [info.reason or info.state for info in self.jobs.infos()]

    def add_round(self, number: int, **values: Any) -> None:
        """Store a round of a job."""
        first = Round(1, {"host": {"accuracy": 0.5}}, 2.0, 10, {"csd0": 10}, {}, {})
        self.store.add_round(number, dataclasses.replace(first, **values))


@pytest.fixture
def open_rig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[], Rig]]:
    """Starts a daemon on a fleet's directory, and ends the one before it."""
    devices = "".join(f'[[device]]\nname = "{name}"\n' for name in DEVICES)
    (tmp_path / "given").mkdir()
    (tmp_path / "fleet.toml").write_text(f'name = "rig"\n{devices}')
    rigs: list[tuple[DaemonServer, JobService, Store]] = []

    def close() -> None:
        for server, jobs, store in rigs:
            server.close()
            jobs.close()
            store.close()
        rigs.clear()

    def command(*arguments: str) -> tuple[int, str, str]:
        name, *rest = arguments
        monkeypatch.setattr(sys, "argv", ["millpond", name, "--fleet", str(tmp_path), *rest])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            app.main()
        return cast(int, exit_.value.code), *capsys.readouterr()

    def begin() -> Rig:
        close()
        fleet, store, begun = directory.read(tmp_path), Store(tmp_path / "fleet.db"), dict[int, StandIn]()

        def stand_in(row: JobRow, context: JobContext, stop: threading.Event) -> StandIn:
            begun[row.id] = StandIn(row, context, stop)
            return begun[row.id]

        monkeypatch.setattr(jobs_service, "Trainer", stand_in)
        known = DeviceRegistry({device.name: stand_in_device(device) for device in fleet.config.device})
        unused = cast(Any, None)
        files = FileCache(fleet.files)

        def context(changed: Callable[[], None]) -> JobContext:
            return JobContext(
                fleet, store, known, unused, unused, unused, changed, unused, files, unused, unused
            )

        jobs = JobService(store, context)
        jobs.resume()
        server = DaemonServer(
            fleet,
            known,
            jobs,
            files,
            LaunchService(fleet, known, unused, unused, unused),
            dict,
            cast(Any, None),
            unused,
        )
        rigs.append((server, jobs, store))
        return Rig(tmp_path, jobs, store, begun, command, server, known)

    yield begin
    close()


@pytest.fixture
def rig(open_rig: Callable[[], Rig]) -> Rig:
    """A daemon of three devices."""
    return open_rig()
