"""Edge: the workers of one job: the host's own and one on each device, prepared, admitted, and kept so."""

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
    """The job was told to stop."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """What a job needs of the daemon. ``mount`` gives the folder of a device's volume on the host;
    ``traffic`` the bytes (to, from) that have crossed each device's tunnel, ``energy`` what meters say. The
    workers on the host are forks of ``zygote``.
    """

    fleet: Fleet
    record: Store
    devices: Mapping[str, Device]
    mount: Callable[[str], Path]
    traffic: Callable[[], Traffic]
    energy: Callable[[], Readings]
    changed: Callable[[], None]
    zygote: Zygote


def since(before: Traffic, now: Traffic) -> Traffic:
    """The bytes (to, from) that have crossed each device's tunnel since then."""
    zero = (0, 0)
    return {
        name: (to - before.get(name, zero)[0], back - before.get(name, zero)[1])
        for name, (to, back) in now.items()
    }


class WorkerGroup:
    """What the crews of both kinds of job share. ``head`` is the worker on the host that makes the first
    state and scores models. A subclass says who the others are, how each is made (``_make``), and whether it
    may take part (``_admit``).
    """

    def __init__(
        self, row: JobRow, around: JobContext, stop: threading.Event, log: logging.Logger, head: str
    ) -> None:
        self._row, self._job, self._around = row, row.job, around
        self._stop, self._log = stop, log
        self._directory = around.fleet.job_directory(row.id)
        self._sources: tuple[str, ...] = ()
        self._measure: Ready | None = None
        self._patience: Deadline | None = None
        self._lock = threading.Lock()
        self._head = WorkerSupervisor(head, lambda: self._make(head), self._admit_head)
        self._others: list[WorkerSupervisor] = []

    def _participant(self, name: str) -> WorkerSupervisor:
        return WorkerSupervisor(name, lambda: self._make(name), lambda ready: self._admit_other(name, ready))

    def _make(self, name: str) -> Worker | None:
        """A new worker; None while its device is not there."""
        raise NotImplementedError

    def _admit(self, name: str, ready: Ready) -> str:
        """Why a worker may not take part; nothing, if it may, and does from now on."""
        raise NotImplementedError

    def _start(self, present: tuple[str, ...]) -> Ready:
        """Start all workers. Returns what the head has prepared, when it and those of the devices that are
        present have settled. Raises JobFailed, Stopped.
        """
        for participant in (self._head, *self._others):
            participant.start()
        self._settle(self._head)
        measure = self._measure
        if self._head.failure or measure is None:
            raise JobFailed(self._head.reason)
        for participant in self._others:
            if participant.name in present or participant.name == HOST:
                self._settle(participant)
        return measure

    def _present(self, resumed: bool) -> tuple[str, ...]:
        """The devices that are ready, after a wait for those that are not. Raises JobFailed if none is."""
        devices, deadline = self._around.devices, Deadline.after(START_SECONDS)
        # after a power cut, boards may take their time: a job that goes on waits for the first of them
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

    def _settle(self, participant: WorkerSupervisor) -> None:
        """Wait until a worker is prepared or out of the job, or its device has been away for long."""
        device = self._around.devices.get(participant.name)
        gone: Deadline | None = None
        while not participant.wait_settled(Deadline.after(0.5)):
            self.check_stop()
            if device is None or device.wait_ready(Deadline.after(0.01)):
                gone = None
            elif (gone := gone or Deadline.after(START_SECONDS)).passed:
                break
        if participant.failure:
            self._log.warning("%s is out of the job: %s", participant.name, participant.failure)
        elif participant.ready and participant.ready.samples:
            self._log.info("%s is prepared with %d samples", participant.name, participant.ready.samples)

    def _admit_head(self, ready: Ready) -> str:
        complaint = self._admit(self._head.name, ready)
        if not complaint:
            self._measure = ready
        return complaint

    def _admit_other(self, name: str, ready: Ready) -> str:
        """The head sets the measure, so wait for it."""
        while not self._head.wait_settled(Deadline.after(0.5)):
            self.check_stop()
        measure = self._measure
        if measure is None:
            return self._head.reason
        if ready.tensors != measure.tensors or ready.size != measure.size:
            return f"{name} builds another model than the host"
        return self._admit(name, ready)

    def _on_host(self, kind: type[P], request: PrepareWorker, states: int | None = None) -> P:
        """A worker process on the host that sees its folders and the held-out samples."""
        test = Path(self._job.data.test)
        if not test.is_dir():
            raise Refused("", "data", f"missing data: there is no folder {test}")
        mounts = [self._around.fleet.mountpoint(name) for name in self._sources]
        folders = [Path(folder) for folder in request.folders]
        readable = [mount for mount in mounts if any(f.is_relative_to(mount) for f in folders)]
        log = self._directory / f"{request.worker}.log"
        return kind(request, [*readable, test], log, self._around.zygote, states)

    def _public_folders(self) -> dict[str, str] | None:
        """Where public data is, by device. None while a volume is away, for a while; then the job does
        without it.
        """
        if self._job.data.public is None:
            return {}
        folders: dict[str, str] = {}
        for name in self._sources:
            try:
                if not self._around.devices[name].wait_ready(Deadline.after(0.1)):
                    raise RemoteError(f"{name}: {self._around.devices[name].status.reason}")
                folders[name] = str(self._around.mount(name) / self._job.data.public)
            except RemoteError as error:
                self._patience = self._patience or Deadline.after(START_SECONDS)
                if not self._patience.passed:
                    return None
                self._log.warning("the public data of %s is left out: %s", name, error)
        self._patience = None  # each time the worker is prepared, volumes have the same time to come
        return folders

    def _ready_device(self, name: str) -> Device | None:
        device = self._around.devices[name]
        return device if device.wait_ready(Deadline.after(0.1)) else None

    def _head_worker(self) -> HostProcess:
        while not self._head.wait_settled(Deadline.after(0.5)):
            self.check_stop()
        worker = self._head.worker
        if not isinstance(worker, HostProcess):
            raise JobFailed(self._head.reason)
        return worker

    def check_stop(self) -> None:
        """Raises Stopped if the job was told to stop."""
        if self._stop.is_set():
            raise JobStopped("stopped")

    def stop(self) -> None:
        """Take all workers out of the job, from any thread: what they are at ends at once."""
        for participant in (self._head, *self._others):
            participant.stop()
