# SPDX-License-Identifier: Apache-2.0
"""Edge: the workers of one job: the host's own and one on each device, prepared, admitted, supervised."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, Refused, RemoteError
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.jobs.energy import Readings
from millpond.host.model.jobs import HOST, JobRow
from millpond.host.store.store import Store
from millpond.host.workers.supervisor import WorkerSupervisor
from millpond.host.workers.worker import HostProcess, Worker
from millpond.linux.zygote.client import Zygote
from millpond.train.protocol import PrepareWorker, Ready

P = TypeVar("P", bound=HostProcess)
Traffic = dict[str, tuple[int, int]]
START_SECONDS = 30.0
EVALUATE_SECONDS = 600.0
TRIES = 3
MOST_SAMPLES = 1 << 24  # of one worker


class JobFailed(LocalError):
    """The job cannot go on; the text says why."""


class JobStopped(LocalError):
    """A user or the end of the daemon stopped the job."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """The parts of the daemon that a job uses. ``mount`` returns the folder of a device's volume on the host,
    ``traffic`` the bytes (to, from) that crossed each device's tunnel, ``energy`` the meters' readings;
    ``changed`` is to be called when the job has made progress. Workers on the host are forks of ``zygote``.
    """

    fleet: Fleet
    store: Store
    devices: Mapping[str, Device]
    mount: Callable[[str], Path]
    traffic: Callable[[], Traffic]
    energy: Callable[[], Readings]
    changed: Callable[[], None]
    zygote: Zygote


def since(before: Traffic, now: Traffic) -> Traffic:
    """Return the bytes (to, from) that crossed each device's tunnel between two counts."""
    zero = (0, 0)
    return {
        name: (to - before.get(name, zero)[0], back - before.get(name, zero)[1])
        for name, (to, back) in now.items()
    }


class WorkerGroup:
    """The workers of a job, for both trainers. ``head`` names the worker on the host that makes the first
    state and scores models; the other workers are the members. A subclass names the members, starts a worker
    (``_new_worker``) and decides whether it takes part (``_admit``).
    """

    def __init__(
        self, row: JobRow, context: JobContext, stop: threading.Event, log: logging.Logger, head: str
    ) -> None:
        self._row, self._job, self._context = row, row.job, context
        self._stop, self._log = stop, log
        self._directory = context.fleet.job_directory(row.id)
        self._sources: tuple[str, ...] = ()
        self._reference: Ready | None = None
        self._volume_deadline: Deadline | None = None
        self._lock = threading.Lock()
        self._head = WorkerSupervisor(head, lambda: self._new_worker(head), self._admit_head)
        self._members: list[WorkerSupervisor] = []

    def _new_supervisor(self, name: str) -> WorkerSupervisor:
        return WorkerSupervisor(
            name, lambda: self._new_worker(name), lambda ready: self._admit_member(name, ready)
        )

    def _new_worker(self, name: str) -> Worker | None:
        """Return a new, unprepared worker; None while its device or its data are absent."""
        raise NotImplementedError

    def _admit(self, name: str, ready: Ready) -> str:
        """Admit a prepared worker and return "", or return the reason for refusing it."""
        raise NotImplementedError

    def _start(self, present: tuple[str, ...]) -> Ready:
        """Start all supervisors. Returns the head's Ready once the head and the members on devices in
        ``present`` are prepared or out of the job. Raises JobFailed, JobStopped.
        """
        for supervisor in (self._head, *self._members):
            supervisor.start()
        self._wait_prepared(self._head)
        reference = self._reference
        if self._head.failure or reference is None:
            raise JobFailed(self._head.reason)
        for supervisor in self._members:
            if supervisor.name in present or supervisor.name == HOST:
                self._wait_prepared(supervisor)
        return reference

    def _wait_for_devices(self, resumed: bool) -> tuple[str, ...]:
        """Wait for the devices, and return the names of the ready ones. Raises JobFailed if none is ready."""
        devices, deadline = self._context.devices, Deadline.after(START_SECONDS)
        # after a power cut, boards may start slowly: a resumed job waits for the first of them
        while not all(device.wait_ready(Deadline.after(0.2)) for device in devices.values()):
            self.check_stop()
            some = any(device.status.state is DeviceState.READY for device in devices.values())
            if deadline.passed and (some or not resumed):
                break
        present = tuple(name for name, device in devices.items() if device.wait_ready(Deadline.after(0.01)))
        if not present:
            reasons = ", ".join(f"{name}: {device.status.reason}" for name, device in devices.items())
            raise JobFailed(f"no device is ready ({reasons or 'the fleet is empty'})")
        return present

    def _wait_prepared(self, supervisor: WorkerSupervisor) -> None:
        """Wait until a worker is prepared or out of the job, or its device is absent for START_SECONDS."""
        device = self._context.devices.get(supervisor.name)
        gone: Deadline | None = None
        while not supervisor.wait_prepared(Deadline.after(0.5)):
            self.check_stop()
            if device is None or device.wait_ready(Deadline.after(0.01)):
                gone = None
            elif (gone := gone or Deadline.after(START_SECONDS)).passed:
                break
        if supervisor.failure:
            self._log.warning("%s is out of the job: %s", supervisor.name, supervisor.failure)
        elif supervisor.ready and supervisor.ready.samples:
            self._log.info("%s is prepared with %d samples", supervisor.name, supervisor.ready.samples)

    def _admit_head(self, ready: Ready) -> str:
        refusal = self._admit(self._head.name, ready)
        if not refusal:
            self._reference = ready
        return refusal

    def _admit_member(self, name: str, ready: Ready) -> str:
        """Wait for the head's model, which is the reference, compare a member's model to it, then admit the
        member.
        """
        while not self._head.wait_prepared(Deadline.after(0.5)):
            self.check_stop()
        reference = self._reference
        if reference is None:
            return self._head.reason
        if ready.tensors != reference.tensors or ready.size != reference.size:
            return f"{name} builds another model than the host"
        return self._admit(name, ready)

    def _on_host(self, kind: type[P], request: PrepareWorker, states: int | None = None) -> P:
        """Return a worker process on the host that can read its folders and the held-out samples."""
        test = Path(self._job.data.test)
        if not test.is_dir():
            raise Refused("", "data", f"missing data: there is no folder {test}")
        mounts = [self._context.fleet.mountpoint(name) for name in self._sources]
        folders = [Path(folder) for folder in request.folders]
        readable = [mount for mount in mounts if any(f.is_relative_to(mount) for f in folders)]
        log = self._directory / f"{request.worker}.log"
        return kind(request, [*readable, test], log, self._context.zygote, states)

    def _public_folders(self) -> dict[str, str] | None:
        """Return the folders of public data by device. Returns None while a volume is absent; after
        START_SECONDS the job goes on without that volume.
        """
        if self._job.data.public is None:
            return {}
        folders: dict[str, str] = {}
        for name in self._sources:
            try:
                if not self._context.devices[name].wait_ready(Deadline.after(0.1)):
                    raise RemoteError(f"{name}: {self._context.devices[name].status.reason}")
                folders[name] = str(self._context.mount(name) / self._job.data.public)
            except RemoteError as error:
                self._volume_deadline = self._volume_deadline or Deadline.after(START_SECONDS)
                if not self._volume_deadline.passed:
                    return None
                self._log.warning("the public data of %s is left out: %s", name, error)
        self._volume_deadline = None  # each time the worker is prepared, volumes have the same time to come
        return folders

    def _ready_device(self, name: str) -> Device | None:
        device = self._context.devices[name]
        return device if device.wait_ready(Deadline.after(0.1)) else None

    def _head_worker(self) -> HostProcess:
        while not self._head.wait_prepared(Deadline.after(0.5)):
            self.check_stop()
        worker = self._head.worker
        if not isinstance(worker, HostProcess):
            raise JobFailed(self._head.reason)
        return worker

    def check_stop(self) -> None:
        """Raise JobStopped if the job is to stop."""
        if self._stop.is_set():
            raise JobStopped("stopped")

    def stop(self) -> None:
        """Stop all supervisors, from any thread: calls to workers that are under way end at once."""
        for supervisor in (self._head, *self._members):
            supervisor.stop()
