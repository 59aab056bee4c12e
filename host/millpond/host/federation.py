"""Edge: one job from its first round to its model: federated averaging, weighted by samples.

A round's state is saved, then the round is recorded; what is recorded has happened. A job that is started
again goes on after its last recorded round and comes to the same bits.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from millpond.host.device import Device
from millpond.host.fleet import Fleet
from millpond.host.participant import Participant
from millpond.host.record import JobRow, Plan, Record, Round
from millpond.host.rounds import Gathering, Staging
from millpond.host.workers import DeviceWorker, LocalWorker, Worker
from millpond.train import checkpoint
from millpond.train.aggregate import Sum, Vector
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


class Federation:
    """Runs one job in the calling thread."""

    def __init__(self, row: JobRow, around: Surroundings, stop: threading.Event) -> None:
        self._row, self._job, self._around, self._stop = row, row.job, around, stop
        self.log = logging.getLogger(f"millpond.host.job.{row.id}")
        self._directory = around.fleet.job_directory(row.id)
        self._host = Participant(HOST, self._make_host_worker)
        self._others = [
            Participant(name, lambda name=name: self._make_device_worker(name))  # type: ignore[misc]
            for name in around.devices
        ]
        self._sources: tuple[str, ...] = ()
        self._patience: Deadline | None = None

    def run(self) -> Path:
        """Train until the target or the last round. Returns the model's path. Raises JobFailed, Stopped."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            ready = self._prepare()
            plan = self._plan()
            done = self._around.record.rounds(self._row.id)
            state, number = self._first_state(done)
            staging = Staging(ready.size)
            while not self._finished(done):
                number += 1
                total = Sum(ready.tensors, plan.most_samples)
                state, result = self._round(number, state, total, staging)
                self._keep(state, ready, result)
                done.append(result)
            return self._save_model(state, ready, number)
        finally:
            self.abort()

    def abort(self) -> None:
        """Take all workers out of the job, from any thread: a round in progress ends at once."""
        for participant in (self._host, *self._others):
            participant.stop()

    def _prepare(self) -> Ready:
        """Start all workers. Returns when the host's and those of all present devices have settled."""
        devices, deadline = self._around.devices, Deadline.after(START_SECONDS)
        while not all(device.wait_ready(Deadline.after(0.2)) for device in devices.values()):
            self._check_stop()
            if deadline.passed:
                break
        present = tuple(name for name, device in devices.items() if device.wait_ready(Deadline.after(0.01)))
        if not present:
            reasons = ", ".join(f"{name}: {device.status.reason}" for name, device in devices.items())
            raise JobFailed(f"no device is ready ({reasons or 'the fleet is empty'})")
        self._sources = self._row.plan.sources if self._row.plan else present
        for participant in (self._host, *self._others):
            participant.start()
        self._settle(self._host)
        if self._host.failure or not self._host.ready:
            raise JobFailed(self._host.reason)
        for participant in self._others:
            if participant.name in present:
                self._settle(participant)
        self._check_devices()
        return self._host.ready

    def _settle(self, participant: Participant) -> None:
        """Wait until a worker is prepared or out of the job, or its device has been away for long."""
        device = self._around.devices.get(participant.name)
        gone: Deadline | None = None
        while not participant.wait_settled(Deadline.after(0.5)):
            self._check_stop()
            if device is None or device.wait_ready(Deadline.after(0.01)):
                gone = None
            elif (gone := gone or Deadline.after(START_SECONDS)).passed:
                break
        self._admit(participant)
        if participant.failure:
            self.log.warning("%s is out of the job: %s", participant.name, participant.failure)
        elif participant.ready:
            self.log.info("%s is prepared with %d samples", participant.name, participant.ready.samples)

    def _admit(self, participant: Participant) -> None:
        """Put a worker out of the job that does not fit in it: another model, or more samples than can be."""
        ready, host = participant.ready, self._host.ready
        if ready is None or host is None or participant.failure:
            return
        if ready.tensors != host.tensors or ready.size != host.size:
            participant.exclude(f"{participant.name} builds another model than the host")
        elif not 0 <= ready.samples <= MOST_SAMPLES:
            participant.exclude(f"{participant.name} claims to have {ready.samples} samples")
        elif self._row.plan and self._all_samples() > self._row.plan.most_samples:
            participant.exclude(f"{participant.name} has more samples than the job was planned for")

    def _all_samples(self) -> int:
        everybody = (self._host, *self._others)
        return sum(p.ready.samples for p in everybody if p.ready and not p.failure)

    def _check_devices(self) -> None:
        """The job is lost if the devices that cannot take part leave less than the quorum."""
        failures = [participant.failure for participant in self._others if participant.failure]
        if len(self._others) - len(failures) < self._quorum:
            raise JobFailed(failures[0])

    @property
    def _quorum(self) -> int:
        return max(1, math.ceil(self._job.federated.quorum * len(self._others)))

    def _make_host_worker(self) -> Worker | None:
        folders = self._public_folders()
        if folders is None:
            return None
        request = Prepare(self._job, HOST, folders, self._row.code)
        readable = [self._around.fleet.mountpoint(name) for name in self._sources if folders]
        return LocalWorker(request, [*readable, Path(self._job.data.test)], self._directory / "worker.log")

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
                self.log.warning("the public data of %s is left out: %s", name, error)
        self._patience = None  # each time the worker is prepared, volumes have the same time to come
        return tuple(folders)

    def _make_device_worker(self, name: str) -> Worker | None:
        device = self._around.devices[name]
        if not device.wait_ready(Deadline.after(0.1)):
            return None
        tls = device.config.encrypt == "always"
        return DeviceWorker(device, Prepare(self._job, name, (self._job.data.private,), self._row.code, tls))

    def _plan(self) -> Plan:
        """Settle what must stay the same when the job resumes."""
        if self._row.plan:
            return self._row.plan
        # Twice as many, up to a power of two, leaves room for devices that join later.
        plan = Plan(self._sources, (1 << (2 * self._all_samples()).bit_length()) - 1)
        self._around.record.set_plan(self._row.id, plan)
        self._row = replace(self._row, plan=plan)
        return plan

    def _first_state(self, done: list[Round]) -> tuple[Vector, int]:
        if done:
            number = done[-1].round
            self.log.info("resumed after round %d", number)
            return checkpoint.load(self._checkpoint(number)).vector, number
        worker = self._host_worker()
        return worker.initial(lambda size: np.empty(size, np.float32), Deadline.after(EVALUATE_SECONDS)), 0

    def _host_worker(self) -> LocalWorker:
        while not self._host.wait_settled(Deadline.after(0.5)):
            self._check_stop()
        worker = self._host.worker
        if not isinstance(worker, LocalWorker):
            raise JobFailed(self._host.reason)
        return worker

    def _finished(self, done: list[Round]) -> bool:
        federated = self._job.federated
        reached = federated.target is not None and bool(done) and done[-1].accuracy >= federated.target
        return reached or len(done) >= federated.rounds

    def _round(self, number: int, state: Vector, total: Sum, staging: Staging) -> tuple[Vector, Round]:
        """One round that counts; a round without quorum is tried again. Raises JobFailed, Stopped."""
        for _ in range(TRIES):
            self._await_quorum()
            started, before = time.monotonic(), self._around.traffic()
            deadline = Deadline.after(self._job.federated.deadline)
            gathering = Gathering(number, state, _empty(total), staging, deadline)
            gathering.run(self._trainers())
            self._check_stop()
            if self._counts(gathering):
                new = gathering.total.average()
                score = self._evaluate(new)
                return new, self._result(gathering, score, started, before)
        raise JobFailed(f"round {number} found no quorum of {self._quorum} devices in {TRIES} tries")

    def _trainers(self) -> list[Participant]:
        for participant in self._others:
            self._admit(participant)  # it may have been prepared anew
        host = [self._host] if self._host.ready and self._host.ready.samples else []
        return [*self._others, *host]

    def _await_quorum(self) -> None:
        """Give devices that were lost the time of one round to come back."""
        deadline = Deadline.after(max(self._job.federated.deadline, START_SECONDS))
        while sum(p.worker is not None for p in self._others) < self._quorum and not deadline.passed:
            self._check_stop()
            self._stop.wait(0.1)

    def _counts(self, gathering: Gathering) -> bool:
        for name, missing in gathering.missing.items():
            self.log.warning("round %d goes on without %s: %s", gathering.number, name, missing.reason)
        counted = sum(name != HOST for name in gathering.counted)
        by_job = [missing.reason for missing in gathering.missing.values() if missing.by_job]
        if not gathering.counted and by_job:
            raise JobFailed(by_job[0])
        return counted >= self._quorum

    def _evaluate(self, state: Vector) -> Score:
        for _ in range(TRIES):
            worker = self._host_worker()
            try:
                return worker.evaluate(state, self._job.data.test, Deadline.after(EVALUATE_SECONDS))
            except Refused as error:
                raise JobFailed(str(error)) from None
            except RemoteError as error:
                self.log.warning("the host's worker was lost: %s", error)
                self._host.lose(worker, str(error))
        raise JobFailed("the host's worker cannot score the model; 'worker.log' of the job may say why")

    def _result(
        self, gathering: Gathering, score: Score, started: float, before: dict[str, tuple[int, int]]
    ) -> Round:
        workers = {name: trained.samples for name, trained in sorted(gathering.counted.items())}
        traffic = {
            name: (to - before.get(name, (0, 0))[0], back - before.get(name, (0, 0))[1])
            for name, (to, back) in self._around.traffic().items()
        }
        missing = {name: missing.reason for name, missing in sorted(gathering.missing.items())}
        seconds = time.monotonic() - started
        samples = sum(workers.values())
        loss = score.loss if math.isfinite(score.loss) else None
        return Round(gathering.number, score.accuracy, loss, seconds, samples, workers, missing, traffic)

    def _keep(self, state: Vector, ready: Ready, result: Round) -> None:
        saved = checkpoint.Checkpoint(state, ready.tensors, self._job.name, result.round)
        checkpoint.save(self._checkpoint(result.round), saved)
        self._around.record.add_round(self._row.id, result)
        self._checkpoint(result.round - 1).unlink(missing_ok=True)
        self.log.info(
            "round %d: accuracy %.4f, loss %s, %d samples, %.2f s",
            result.round,
            result.accuracy,
            result.loss,
            result.samples,
            result.seconds,
        )
        self._around.changed()

    def _save_model(self, state: Vector, ready: Ready, number: int) -> Path:
        path = self._directory / "model.safetensors"
        checkpoint.save(path, checkpoint.Checkpoint(state, ready.tensors, self._job.name, number))
        return path

    def _checkpoint(self, number: int) -> Path:
        return self._directory / f"round-{number:05d}.safetensors"

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Stopped("stopped")


def _empty(total: Sum) -> Sum:
    return Sum(total.tensors, total.most_samples, bound=total.bound)
