"""Edge: the workers of a synchronous job: the keeper of the model, the host's own, and one on each device."""

from __future__ import annotations

import logging
import os
import threading
import weakref

from millpond.base.deadline import Deadline
from millpond.host.jobs.synchronous.shards import Shard
from millpond.host.jobs.worker_group import (
    MOST_SAMPLES,
    START_SECONDS,
    TRIES,
    JobContext,
    JobFailed,
    WorkerGroup,
)
from millpond.host.model.jobs import HOST, JobRow
from millpond.host.workers.parameter_server import ParameterServer
from millpond.host.workers.supervisor import WorkerSupervisor
from millpond.host.workers.worker import DeviceWorker, LocalWorker, Worker
from millpond.linux import memory
from millpond.train.balance.equal_time import LEAST_BATCH
from millpond.train.job.spec import Job
from millpond.train.protocol import PrepareWorker, Ready

KEEPER = "keeper"


class SynchronousGroup(WorkerGroup):
    """``names`` has the workers by rank. ``prepare`` once; then ask who is there."""

    def __init__(self, row: JobRow, around: JobContext, stop: threading.Event, log: logging.Logger) -> None:
        super().__init__(row, around, stop, log, KEEPER)
        self.names = ((HOST,) if _host_computes(row.job) else ()) + tuple(around.devices)
        self._others = [self._participant(name) for name in self.names]
        self._host_sources: tuple[str, ...] = ()
        self._states = memory.make("states")
        weakref.finalize(self, os.close, self._states)

    def prepare(self, resumed: bool) -> Ready:
        """Start all workers. Returns what the keeper has prepared. Raises JobFailed, Stopped."""
        self._sources = self._present(resumed)
        ready = self._start(self._sources)
        if all(participant.failure for participant in self._others):
            raise JobFailed(self._others[-1].failure)
        return ready

    def _admit(self, name: str, ready: Ready) -> str:
        if min(ready.parts, default=0) < 0 or not sum(ready.parts) == ready.samples <= MOST_SAMPLES:
            return f"{name} claims to have {ready.samples} samples in {ready.parts}"
        if name != KEEPER and len(ready.parts) != len(self._folders_of(name)):
            return f"{name} has samples of {len(ready.parts)} folders, not {len(self._folders_of(name))}"
        if name != KEEPER and ready.samples < LEAST_BATCH:
            return f"{name} has {ready.samples} samples; a step takes at least {LEAST_BATCH}"
        return ""

    def _make(self, name: str) -> Worker | None:
        job, code = self._job, self._row.code
        count = len(self.names) + 1  # of states: who is late holds one, and whoever is lost none
        if name == KEEPER:
            request = PrepareWorker(job, KEEPER, (), code, role="keeper", states=count)
            return self._on_host(ParameterServer, request, self._states)
        if name == HOST:
            folders = self._public_folders()
            if folders is None:
                return None
            self._host_sources = tuple(folders)
            request = PrepareWorker(job, HOST, tuple(folders.values()), code, role="steps", states=count)
            return self._on_host(LocalWorker, request, self._states)
        device = self._ready_device(name)
        if device is None:
            return None
        own = (job.data.private,) if job.data.public is None else (job.data.private, job.data.public)
        tls = device.config.encrypt == "always"
        return DeviceWorker(device, PrepareWorker(job, name, own, code, tls, role="steps"))

    def _folders_of(self, name: str) -> list[tuple[str, bool]]:
        """Whose samples a worker's folders hold, and whether public ones."""
        if name == HOST:
            return [(source, True) for source in self._host_sources]
        return [(name, False)] if self._job.data.public is None else [(name, False), (name, True)]

    def holdings_of(self, rank: int, ready: Ready) -> list[Shard]:
        """What a prepared worker can read, by folder."""
        folders = self._folders_of(self.names[rank])
        return [Shard(*folder, count) for folder, count in zip(folders, ready.parts, strict=True)]

    def participant(self, rank: int) -> WorkerSupervisor:
        """One worker's part."""
        return self._others[rank]

    def kind(self, rank: int) -> str:
        """What a worker runs on: workers of one kind have one curve."""
        name = self.names[rank]
        return HOST if name == HOST else self._around.devices[name].config.board

    def keeper(self) -> ParameterServer:
        """The process that keeps the model. Raises JobFailed, Stopped."""
        worker = self._head_worker()
        assert isinstance(worker, ParameterServer)
        return worker

    def wait_for_anyone(self) -> None:
        """Give workers time to come back when all are lost. Raises JobFailed, Stopped."""
        deadline = Deadline.after(TRIES * START_SECONDS)
        while not any(participant.worker for participant in self._others):
            self.check_stop()
            if deadline.passed or all(participant.failure for participant in self._others):
                reasons = ", ".join(f"{p.name}: {p.reason}" for p in self._others)
                raise JobFailed(f"no worker is left ({reasons})")
            self._stop.wait(0.1)


def _host_computes(job: Job) -> bool:
    assert job.synchronous is not None
    return job.synchronous.host and job.data.public is not None
