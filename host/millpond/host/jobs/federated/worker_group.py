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
    """``prepare`` once; then ask for the trainers of each round."""

    def __init__(self, row: JobRow, around: JobContext, stop: threading.Event, log: logging.Logger) -> None:
        super().__init__(row, around, stop, log, HOST)
        self._others = [self._participant(name) for name in around.devices]
        self._most_samples: int | None = None
        self._admitted: dict[str, int] = {}

    @property
    def quorum(self) -> int:
        """How many devices must answer for a round to count."""
        return max(1, math.ceil(self._job.federated.quorum * len(self._others) - 1e-9))

    def prepare(self) -> tuple[Ready, JobPlan]:
        """Start all workers. The plan is what the job keeps when it resumes. Raises JobFailed, Stopped."""
        plan = self._row.plan
        present = self._present(resumed=plan is not None)
        self._sources = plan.sources if plan else present
        self._most_samples = plan.most_samples if plan else None
        measure = self._start(present)
        self._check_devices()
        return measure, plan or self._plan()

    def _plan(self) -> JobPlan:
        """Settle what must stay the same when the job resumes."""
        # Twice as many, up to a power of two, leaves room for devices that join later.
        with self._lock:
            samples = sum(self._admitted.values())
            self._most_samples = (1 << (2 * samples).bit_length()) - 1
        plan = JobPlan(self._sources, self._most_samples)
        self._around.record.set_plan(self._row.id, plan)
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
        """The job is lost if the devices that cannot take part leave less than the quorum."""
        failures = [participant.failure for participant in self._others if participant.failure]
        if len(self._others) - len(failures) < self.quorum:
            raise JobFailed(failures[0])

    def _make(self, name: str) -> Worker | None:
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
        """Who is asked in the next round: all devices, and the host if it has data of its own."""
        host = [self._head] if self._admitted.get(HOST) else []
        return [*self._others, *host]

    def first_state(self) -> Vector:
        """The seeded state that training begins from."""
        worker = self._host_worker()
        return worker.initial(lambda size: np.empty(size, np.float32), Deadline.after(EVALUATE_SECONDS))

    def evaluate(self, state: Vector) -> Score:
        """Score a state on the held-out samples, on the host. Raises JobFailed, Stopped."""
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
        """Give devices that were lost the time of one round to come back."""
        deadline = Deadline.after(max(self._job.federated.deadline, START_SECONDS))
        while sum(p.worker is not None for p in self._others) < self.quorum and not deadline.passed:
            self.check_stop()
            self._stop.wait(0.1)
