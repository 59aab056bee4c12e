"""Edge: the workers of one job: the host's own and one on each device, prepared, admitted, and kept so."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millpond.host.device import Device
from millpond.host.fleet import Fleet
from millpond.host.lifecycle import State
from millpond.host.participant import Participant
from millpond.host.record import JobRow, Plan, Record
from millpond.host.workers import DeviceWorker, LocalWorker, Worker
from millpond.train.aggregate import Vector
from millpond.train.protocol import Prepare, Ready, Score
from millpond.wire.deadline import Deadline
from millpond.wire.errors import LocalError, Refused, RemoteError

HOST = "host"
START_SECONDS = 30.0
EVALUATE_SECONDS = 600.0
TRIES = 3
MOST_SAMPLES = 1 << 24  # of one worker


class JobFailed(LocalError):
    """The job cannot go on; the text says why."""


class Stopped(LocalError):
    """The job was told to stop."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a job needs of the daemon. ``mount`` gives the folder of a device's volume on the host;
    ``traffic`` the bytes (to, from) that have crossed each device's tunnel.
    """

    fleet: Fleet
    record: Record
    devices: Mapping[str, Device]
    mount: Callable[[str], Path]
    traffic: Callable[[], dict[str, tuple[int, int]]]
    changed: Callable[[], None]


class Crew:
    """All workers of one job. ``prepare`` once; then ask for the trainers of each round."""

    def __init__(self, row: JobRow, around: Surroundings, stop: threading.Event, log: logging.Logger) -> None:
        self._row, self._job, self._around = row, row.job, around
        self._stop, self._log = stop, log
        self._directory = around.fleet.job_directory(row.id)
        self._host = Participant(HOST, self._make_host_worker, lambda ready: self._admit(HOST, ready))
        self._others = [self._participant(name) for name in around.devices]
        self._sources: tuple[str, ...] = ()
        self._most_samples: int | None = None
        self._admitted: dict[str, int] = {}
        self._measure: Ready | None = None
        self._patience: Deadline | None = None
        self._lock = threading.Lock()

    def _participant(self, name: str) -> Participant:
        return Participant(
            name, lambda: self._make_device_worker(name), lambda ready: self._admit_device(name, ready)
        )

    @property
    def quorum(self) -> int:
        """How many devices must answer for a round to count."""
        return max(1, math.ceil(self._job.federated.quorum * len(self._others) - 1e-9))

    def prepare(self) -> tuple[Ready, Plan]:
        """Start all workers. Returns when the host's and those of all present devices have settled.

        The plan is what the job keeps when it resumes. Raises JobFailed, Stopped.
        """
        present = self._present()
        plan = self._row.plan
        self._sources = plan.sources if plan else present
        self._most_samples = plan.most_samples if plan else None
        for participant in (self._host, *self._others):
            participant.start()
        self._settle(self._host)
        measure = self._measure
        if self._host.failure or measure is None:
            raise JobFailed(self._host.reason)
        for participant in self._others:
            if participant.name in present:
                self._settle(participant)
        self._check_devices()
        return measure, plan or self._plan()

    def _present(self) -> tuple[str, ...]:
        """The devices that are ready, after a wait for those that are not. Raises JobFailed if none is."""
        devices, deadline = self._around.devices, Deadline.after(START_SECONDS)
        resumed = self._row.plan is not None  # after a power cut, boards may take their time
        while not all(device.wait_ready(Deadline.after(0.2)) for device in devices.values()):
            self.check_stop()
            some = any(device.status.state is State.READY for device in devices.values())
            if deadline.passed and (some or not resumed):
                break
        present = tuple(name for name, device in devices.items() if device.wait_ready(Deadline.after(0.01)))
        if not present:
            reasons = ", ".join(f"{name}: {device.status.reason}" for name, device in devices.items())
            raise JobFailed(f"no device is ready ({reasons or 'the fleet is empty'})")
        return present

    def _plan(self) -> Plan:
        """Settle what must stay the same when the job resumes."""
        # Twice as many, up to a power of two, leaves room for devices that join later.
        with self._lock:
            samples = sum(self._admitted.values())
            self._most_samples = (1 << (2 * samples).bit_length()) - 1
        plan = Plan(self._sources, self._most_samples)
        self._around.record.set_plan(self._row.id, plan)
        return plan

    def _settle(self, participant: Participant) -> None:
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
        elif participant.ready:
            self._log.info("%s is prepared with %d samples", participant.name, participant.ready.samples)

    def _admit_device(self, name: str, ready: Ready) -> str:
        """The host's own worker sets the measure, so wait for it."""
        while not self._host.wait_settled(Deadline.after(0.5)):
            self.check_stop()
        host = self._measure
        if host is None:
            return self._host.reason
        if ready.tensors != host.tensors or ready.size != host.size:
            return f"{name} builds another model than the host"
        return self._admit(name, ready)

    def _admit(self, name: str, ready: Ready) -> str:
        """Why a worker has too many samples for the job; nothing, if it has not, and counts from now on."""
        with self._lock:
            total = ready.samples + sum(count for other, count in self._admitted.items() if other != name)
            if not 0 <= ready.samples <= MOST_SAMPLES:
                return f"{name} claims to have {ready.samples} samples"
            if self._most_samples is not None and total > self._most_samples:
                return f"{name} has more samples than the job was planned for"
            self._admitted[name] = ready.samples
            if name == HOST:
                self._measure = ready
        return ""

    def _check_devices(self) -> None:
        """The job is lost if the devices that cannot take part leave less than the quorum."""
        failures = [participant.failure for participant in self._others if participant.failure]
        if len(self._others) - len(failures) < self.quorum:
            raise JobFailed(failures[0])

    def _make_host_worker(self) -> Worker | None:
        folders = self._public_folders()
        if folders is None:
            return None
        test = Path(self._job.data.test)
        if not test.is_dir():
            raise Refused("", "data", f"missing data: there is no folder {test}")
        request = Prepare(self._job, HOST, folders, self._row.code)
        mounts = [self._around.fleet.mountpoint(name) for name in self._sources]
        readable = [mount for mount in mounts if any(Path(f).is_relative_to(mount) for f in folders)]
        return LocalWorker(request, [*readable, test], self._directory / "worker.log")

    def _public_folders(self) -> tuple[str, ...] | None:
        """Where public data is. None while a volume is away, for a while; then the job does without it."""
        if self._job.data.public is None:
            return ()
        folders: list[str] = []
        for name in self._sources:
            try:
                if not self._around.devices[name].wait_ready(Deadline.after(0.1)):
                    raise RemoteError(f"{name}: {self._around.devices[name].status.reason}")
                folders.append(str(self._around.mount(name) / self._job.data.public))
            except RemoteError as error:
                self._patience = self._patience or Deadline.after(START_SECONDS)
                if not self._patience.passed:
                    return None
                self._log.warning("the public data of %s is left out: %s", name, error)
        self._patience = None  # each time the worker is prepared, volumes have the same time to come
        return tuple(folders)

    def _make_device_worker(self, name: str) -> Worker | None:
        device = self._around.devices[name]
        if not device.wait_ready(Deadline.after(0.1)):
            return None
        tls = device.config.encrypt == "always"
        return DeviceWorker(device, Prepare(self._job, name, (self._job.data.private,), self._row.code, tls))

    def trainers(self) -> list[Participant]:
        """Who is asked in the next round: all devices, and the host if it has data of its own."""
        host = [self._host] if self._admitted.get(HOST) else []
        return [*self._others, *host]

    def await_quorum(self) -> None:
        """Give devices that were lost the time of one round to come back."""
        deadline = Deadline.after(max(self._job.federated.deadline, START_SECONDS))
        while sum(p.worker is not None for p in self._others) < self.quorum and not deadline.passed:
            self.check_stop()
            self._stop.wait(0.1)

    def first_state(self) -> Vector:
        """The seeded state that the first round trains from."""
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
                self._host.lose(worker, str(error))
        raise JobFailed("the host's worker cannot score the model; 'worker.log' of the job may say why")

    def _host_worker(self) -> LocalWorker:
        while not self._host.wait_settled(Deadline.after(0.5)):
            self.check_stop()
        worker = self._host.worker
        if not isinstance(worker, LocalWorker):
            raise JobFailed(self._host.reason)
        return worker

    def check_stop(self) -> None:
        """Raises Stopped if the job was told to stop."""
        if self._stop.is_set():
            raise Stopped("stopped")

    def stop(self) -> None:
        """Take all workers out of the job, from any thread: a round in progress ends at once."""
        for participant in (self._host, *self._others):
            participant.stop()
