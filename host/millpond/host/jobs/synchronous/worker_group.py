# SPDX-License-Identifier: Apache-2.0
"""Edge: the workers of a synchronous job: the parameter server, the host's own worker, one on each device."""

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

PARAMETER_SERVER = "parameter-server"


class SynchronousGroup(WorkerGroup):
    """The workers of a synchronous job; ``names`` has them by rank. Call ``prepare`` once."""

    def __init__(self, row: JobRow, context: JobContext, stop: threading.Event, log: logging.Logger) -> None:
        super().__init__(row, context, stop, log, PARAMETER_SERVER)
        self.names = ((HOST,) if _host_computes(row.job) else ()) + tuple(context.devices)
        self._members = [self._new_supervisor(name) for name in self.names]
        self._host_sources: tuple[str, ...] = ()
        self._states = memory.make("states")
        weakref.finalize(self, os.close, self._states)

    def prepare(self, resumed: bool) -> Ready:
        """Start all workers. Returns the parameter server's Ready. Raises JobFailed, JobStopped."""
        self._sources = self._wait_for_devices(resumed)
        ready = self._start(self._sources)
        if all(supervisor.failure for supervisor in self._members):
            raise JobFailed(self._members[-1].failure)
        return ready

    def _admit(self, name: str, ready: Ready) -> str:
        if min(ready.parts, default=0) < 0 or not sum(ready.parts) == ready.samples <= MOST_SAMPLES:
            return f"{name} claims to have {ready.samples} samples in {ready.parts}"
        if name != PARAMETER_SERVER and len(ready.parts) != len(self._folders_of(name)):
            return f"{name} has samples of {len(ready.parts)} folders, not {len(self._folders_of(name))}"
        if name != PARAMETER_SERVER and ready.samples < LEAST_BATCH:
            return f"{name} has {ready.samples} samples; a step takes at least {LEAST_BATCH}"
        return ""

    def _new_worker(self, name: str) -> Worker | None:
        job, code = self._job, self._row.code
        count = len(self.names) + 1  # of states: a late worker uses one, a lost worker none
        if name == PARAMETER_SERVER:
            request = PrepareWorker(job, PARAMETER_SERVER, (), code, role="parameter_server", states=count)
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
        """Return, for each folder of a worker, the device whose samples it holds, and whether they are
        public.
        """
        if name == HOST:
            return [(source, True) for source in self._host_sources]
        return [(name, False)] if self._job.data.public is None else [(name, False), (name, True)]

    def shards_of(self, rank: int, ready: Ready) -> list[Shard]:
        """Return the shards that a prepared worker can read, by folder."""
        folders = self._folders_of(self.names[rank])
        return [Shard(*folder, count) for folder, count in zip(folders, ready.parts, strict=True)]

    def supervisor(self, rank: int) -> WorkerSupervisor:
        """Return the supervisor of a worker."""
        return self._members[rank]

    def kind(self, rank: int) -> str:
        """Return the kind of machine a worker runs on: workers of one kind share one curve."""
        name = self.names[rank]
        return HOST if name == HOST else self._context.devices[name].config.board

    def parameter_server(self) -> ParameterServer:
        """Return the prepared parameter server. Raises JobFailed, JobStopped."""
        worker = self._head_worker()
        assert isinstance(worker, ParameterServer)
        return worker

    def wait_for_worker(self) -> None:
        """Wait until a worker is prepared, when all were lost. Raises JobFailed, JobStopped."""
        deadline = Deadline.after(TRIES * START_SECONDS)
        while not any(supervisor.worker for supervisor in self._members):
            self.check_stop()
            if deadline.passed or all(supervisor.failure for supervisor in self._members):
                reasons = ", ".join(f"{p.name}: {p.reason}" for p in self._members)
                raise JobFailed(f"no worker is left ({reasons})")
            self._stop.wait(0.1)


def _host_computes(job: Job) -> bool:
    assert job.synchronous is not None
    return job.synchronous.host and job.data.public is not None
