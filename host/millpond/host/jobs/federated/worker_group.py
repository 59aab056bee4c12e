# SPDX-License-Identifier: Apache-2.0
"""Edge: the workers of a federated job: one on each device, and the host's, which also scores averages."""

from __future__ import annotations

import logging
import math
import threading

import numpy as np

from millpond.base.deadline import Deadline
from millpond.base.errors import Refused, RemoteError
from millpond.host.jobs.worker_group import (
    EVALUATE_SECONDS,
    MOST_SAMPLES,
    START_SECONDS,
    TRIES,
    JobContext,
    JobFailed,
    WorkerGroup,
)
from millpond.host.model.jobs import HOST, JobPlan, JobRow
from millpond.host.workers.supervisor import WorkerSupervisor
from millpond.host.workers.worker import DeviceWorker, LocalWorker, Worker
from millpond.train.protocol import PrepareWorker, Ready, Score
from millpond.train.reduce.exact import Vector


class FederatedGroup(WorkerGroup):
    """The workers of a federated job. Call ``prepare`` once, then ask for the ``trainers`` of each round."""

    def __init__(self, row: JobRow, context: JobContext, stop: threading.Event, log: logging.Logger) -> None:
        super().__init__(row, context, stop, log, HOST)
        self._members = [self._new_supervisor(name) for name in context.devices]
        self._most_samples: int | None = None
        self._admitted: dict[str, int] = {}

    @property
    def quorum(self) -> int:
        """The number of devices that must answer for a round to count."""
        return max(1, math.ceil(self._job.federated.quorum * len(self._members) - 1e-9))

    def prepare(self) -> tuple[Ready, JobPlan]:
        """Start all workers. Returns the head's Ready, and the plan that the job keeps when it resumes.
        Raises JobFailed, JobStopped.
        """
        plan = self._row.plan
        present = self._wait_for_devices(resumed=plan is not None)
        self._sources = plan.sources if plan else present
        self._most_samples = plan.most_samples if plan else None
        reference = self._start(present)
        self._check_devices()
        return reference, plan or self._plan()

    def _plan(self) -> JobPlan:
        """Choose and store what must stay the same when the job resumes."""
        # Twice as many, up to a power of two, leaves room for devices that join later.
        with self._lock:
            samples = sum(self._admitted.values())
            self._most_samples = (1 << (2 * samples).bit_length()) - 1
        plan = JobPlan(self._sources, self._most_samples)
        self._context.store.set_plan(self._row.id, plan)
        return plan

    def _admit(self, name: str, ready: Ready) -> str:
        with self._lock:
            total = ready.samples + sum(count for other, count in self._admitted.items() if other != name)
            if not 0 <= ready.samples <= MOST_SAMPLES:
                return f"{name} claims to have {ready.samples} samples"
            if self._most_samples is not None and total > self._most_samples:
                return f"{name} has more samples than the job was planned for"
            self._admitted[name] = ready.samples
        return ""

    def _check_devices(self) -> None:
        """Raise JobFailed if the devices that can take part are fewer than the quorum."""
        failures = [supervisor.failure for supervisor in self._members if supervisor.failure]
        if len(self._members) - len(failures) < self.quorum:
            raise JobFailed(failures[0])

    def _new_worker(self, name: str) -> Worker | None:
        code = self._row.code
        if name == HOST:
            folders = self._public_folders()
            if folders is None:
                return None
            return self._on_host(LocalWorker, PrepareWorker(self._job, HOST, tuple(folders.values()), code))
        device = self._ready_device(name)
        if device is None:
            return None
        tls = device.config.encrypt == "always"
        return DeviceWorker(device, PrepareWorker(self._job, name, (self._job.data.private,), code, tls))

    def trainers(self) -> list[WorkerSupervisor]:
        """Return the supervisors of the workers to ask in a round: all devices, and the host if it has data
        of its own.
        """
        host = [self._head] if self._admitted.get(HOST) else []
        return [*self._members, *host]

    def first_state(self) -> Vector:
        """Return the seeded state that training begins from, float32 [size]."""
        worker = self._host_worker()
        return worker.initial(lambda size: np.empty(size, np.float32), Deadline.after(EVALUATE_SECONDS))

    def evaluate(self, state: Vector) -> Score:
        """Score a state on the held-out samples, on the host. Raises JobFailed, JobStopped."""
        for _ in range(TRIES):
            worker = self._host_worker()
            try:
                return worker.evaluate(state, self._job.data.test, Deadline.after(EVALUATE_SECONDS))
            except Refused as error:
                raise JobFailed(str(error)) from None
            except RemoteError as error:
                self._log.warning("the host's worker was lost: %s", error)
                self._head.lose(worker, str(error))
        raise JobFailed("the host's worker cannot score the model; its log with the job's may say why")

    def _host_worker(self) -> LocalWorker:
        worker = self._head_worker()
        assert isinstance(worker, LocalWorker)
        return worker

    def await_quorum(self) -> None:
        """Wait until a quorum of devices has prepared workers, at most for the time of one round."""
        deadline = Deadline.after(max(self._job.federated.deadline, START_SECONDS))
        while sum(p.worker is not None for p in self._members) < self.quorum and not deadline.passed:
            self.check_stop()
            self._stop.wait(0.1)
