# SPDX-License-Identifier: Apache-2.0
"""Edge: the workers of one job: the parameter server, the host's own worker, and one on each device."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Literal

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, LocalError, RemoteError
from millpond.base.text import LONGEST
from millpond.host.api.daemon import PreparedWorker, PreparedWorkers
from millpond.host.fleet.device import Device
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.jobs import artifacts
from millpond.host.jobs.context import JobContext, JobFailed, JobStopped
from millpond.host.jobs.data_streams import DataStreams
from millpond.host.jobs.job_folder import HOST_LOG, SERVER_LOG, STATE
from millpond.host.jobs.training.shards import Shard
from millpond.host.records.failures import listed, reason_of
from millpond.host.records.jobs import HOST, JobPlan, JobRow
from millpond.host.workers.parameter_server import ParameterServer
from millpond.host.workers.supervisor import PREPARE_SECONDS, WorkerSupervisor
from millpond.host.workers.worker import DeviceWorker, LocalWorker, Worker
from millpond.linux import memory
from millpond.train.balance.equal_time import LEAST_BATCH
from millpond.train.job import signed_code
from millpond.train.job.files import JobFile, laid_out, wheels_of
from millpond.train.job.log_name import run_name
from millpond.train.job.spec import Job
from millpond.train.job.wheels import fitting
from millpond.train.protocol import FIRST_VALUES, Folder, PrepareServer, PrepareWorker, Ready
from millpond.train.state import checkpoint, layout
from millpond.train.state.checkpoint import Checkpoint
from millpond.train.state.layout import Tensor
from millpond.train.strategies.strategy import LocalRule
from millpond.train.worker.start import WorkerFiles
from millpond.wire.texts import cleaned

START_SECONDS = 30.0


class WorkerGroup:
    """The workers of a job; ``names`` has them by rank. Call ``start`` once; ``stop`` from any thread."""

    def __init__(self, row: JobRow, context: JobContext, stop: threading.Event, log: logging.Logger) -> None:
        self._row, self._job, self._context = row, row.job, context
        self._stop, self._log = stop, log
        self._directory = context.fleet.job_directory(row.id)
        self._files, self._overlay = WorkerFiles(self._directory / "code"), contextlib.ExitStack()
        self.names = ((HOST,) if host_trains(row.job) else ()) + tuple(context.devices)
        self._data, self._streams = row.job.data.of_device, DataStreams(row.job, context)
        self._members = [self._new_supervisor(name) for name in self.names]
        self._host_folders: tuple[Folder, ...] = ()
        self._volume_deadline: Deadline | None = None
        self._states = memory.make("states")
        weakref.finalize(self, os.close, self._states)
        self._server: ParameterServer | None = None
        self._tensors: tuple[Tensor, ...] = ()
        self._work = self._job.work  # with what the strategy declares, as soon as the model is known
        self._frozen, self._unsent = 0, tuple[str, ...]()
        self._model_known, self._writing_first = threading.Event(), threading.Lock()

    def start(self, *, resumed: bool) -> ParameterServer:
        """Start all workers. Returns the prepared parameter server, once the workers of all present devices
        are prepared, or out of the job. Raises JobFailed, JobStopped, RemoteError.
        """
        present = self._wait_for_devices(resumed)
        self._streams.open()
        self._sources = self._row.plan.sources if self._row.plan else present
        if self._row.plan is None:
            self._context.store.set_plan(self._row.id, JobPlan(present))
        self._lay_out_files()
        for supervisor in self._members:
            supervisor.start()
        server = self._start_server()
        for supervisor in self._members:
            if supervisor.name in present or supervisor.name == HOST:
                self._wait_prepared(supervisor)
        return server

    def _lay_out_files(self) -> None:
        """Lay the job's files out, and install its wheels, for the workers on the host. Raises LocalError."""
        shutil.rmtree(self._files.folder, ignore_errors=True)
        self._context.files.check(self._row.files)
        self._context.files.link(laid_out(self._row.files), self._files.folder)
        wheels = wheels_of(self._row.files)
        if wheels := {name: wheels[name] for name in fitting(wheels)}:
            overlay = self._overlay.enter_context(self._context.overlays.held(wheels))
            self._context.overlays.install(overlay, wheels, self._context.files.path)
            self._files = replace(self._files, wheels=overlay)

    def _start_server(self) -> ParameterServer:
        job = self._job
        readable = [Path(job.data.test)] if job.data.test else []
        for folder in readable:
            if not folder.is_dir():
                raise JobFailed(f"missing data: there is no folder {folder}")
        request = PrepareServer(
            job.work,
            job.strategy,
            self._state_count,
            job.data.test,
            self._accelerator,
            job.data.is_streamed,
        )
        log = self._directory / SERVER_LOG
        try:
            server = ParameterServer(request, self._files, readable, log, self._context.zygote, self._states)
        except OSError as error:  # its zygote has died, or a resource of the host is short
            raise RemoteError(f"the parameter server cannot be started: {error}") from None
        self._server = server
        self.check_stop()
        server.prepare(Deadline.after(PREPARE_SECONDS))
        self._tensors, self._frozen = server.tensors, server.ready.checksum
        self._unsent = tuple(tensor.name for tensor in server.ready.frozen)
        self._work = replace(job.work, local=server.ready.local)
        self._model_known.set()
        return server

    @property
    def _accelerator(self) -> Literal["auto", "cpu", "cuda"]:
        return self._context.fleet.config.host.accelerator

    @property
    def _state_count(self) -> int:
        return len(self.names) + 1  # a late worker uses one, a lost worker none

    def _new_supervisor(self, name: str) -> WorkerSupervisor:
        return WorkerSupervisor(name, lambda: self._new_worker(name), lambda ready: self._admit(name, ready))

    def _new_worker(self, name: str) -> Worker | None:
        """Return a new, unprepared worker; None while its device or its data are absent."""
        if name == HOST:
            return self._new_host_worker()
        device = self._context.devices[name]
        if not device.wait_ready(Deadline.after(0.1)):
            return None
        contents = self._context.files.path
        return DeviceWorker(
            device, lambda deadline: self._request_of(device, deadline), contents, self._first_values
        )

    def _first_values(self) -> tuple[JobFile, Path]:
        """Return a file of what the model has besides the exchanged tensors. Raises LocalError, OSError."""
        assert self._server is not None
        path = self._directory / FIRST_VALUES
        with self._writing_first:
            if not path.exists():
                frozen, (_, values) = self._server.ready.frozen, self._server.model()
                own = values[len(values) - layout.size(frozen) :]
                checkpoint.save(path, Checkpoint(own, frozen, self._job.name, 0))
            with path.open("rb") as file:
                return JobFile(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size), path

    def _request_of(self, device: Device, deadline: Deadline) -> PrepareWorker:
        """Wait for the parameter server's model, and return the request to a worker on a device."""
        self._wait_for_model(deadline)
        tls = device.config.encrypt == "always"
        folders, files = self._folders_of(device.name), dict(self._row.files)
        signed = files.pop(self._job.code.signature, None)
        signed_code.check_signature_size(signed, self._job.name)
        signature = self._context.files.path(signed).read_text(errors="replace") if signed else ""
        return PrepareWorker(
            self._work,
            device.name,
            folders,
            files,
            self._tensors,
            self._frozen,
            tls,
            signature=signature,
            run=self._run,
            streams=self._streams.place(device.name, folders),
            unsent=self._unsent,
        )

    def _wait_for_model(self, deadline: Deadline) -> None:
        while not self._model_known.wait(0.2):
            if self._stop.is_set():
                raise ConnectionLost("the job has ended")
            deadline.remaining()

    def _new_host_worker(self) -> LocalWorker | None:
        self._wait_for_model(Deadline.after(PREPARE_SECONDS))
        folders = self._public_folders()
        if folders is None:
            return None
        self._host_folders = folders
        request = PrepareWorker(
            self._work,
            HOST,
            folders,
            {},
            self._tensors,
            self._frozen,
            states=self._state_count,
            accelerator=self._accelerator,
            run=self._run,
        )
        streams = self._streams.relay(folders)
        readable = [
            self._context.fleet.mountpoint(folder.source) for folder in folders if not folder.streamed
        ]
        log = self._directory / HOST_LOG
        kept = self._directory / STATE
        kept.mkdir(exist_ok=True)
        zygote = self._context.zygote
        return LocalWorker(request, self._files, readable, log, zygote, self._states, kept, streams)

    def _admit(self, name: str, ready: Ready) -> str:
        """Return "" to admit a prepared worker, or the reason for refusing it."""
        folders, most = self._folders_of(name), self._job.limits.most_samples
        if min((*ready.parts, *ready.held), default=0) < 0 or len(ready.parts) != len(folders):
            return f"it claims to have samples of {len(ready.parts)} folders, not {len(folders)}"
        if ready.samples + sum(ready.held) > most:
            return f"it claims to have {ready.samples} samples; the job allows {most} (limits.most_samples)"
        private = self._job.data.private  # the folder, which is the first
        if private and not 1 <= ready.group <= max(1, *ready.parts[:1]):
            return f"it has its private samples in groups of {ready.group}, and has {ready.parts[0]}"
        if ready.samples < LEAST_BATCH:
            where = ", ".join(folder.path for folder in folders)
            return f"it has {ready.samples} samples in {where}; training takes at least {LEAST_BATCH}"
        return ""

    def _folders_of(self, name: str) -> tuple[Folder, ...]:
        if name == HOST:
            return self._host_folders
        data, found = self._job.data, self._data
        private = (Folder(data.private, name),) if data.private else ()
        # In rounds the public samples are the host's, which has less to do than its devices.
        if data.public is None or self._job.synchronous is None:
            return private
        if found is None:
            return (*private, Folder(data.public, name, public=True))
        if name == found.device:
            return (*private, Folder(found.path, name, public=True))
        return private or (self._streams.folder,)

    def shards_of(self, rank: int, ready: Ready) -> list[Shard]:
        """Return the shards that a prepared worker can read, by folder."""
        folders = self._folders_of(self.names[rank])
        return [
            Shard(f.source, f.public, count, 1 if f.public else ready.group)
            for f, count in zip(folders, ready.parts, strict=True)
        ]

    def supervisor(self, rank: int) -> WorkerSupervisor:
        """Return the supervisor of a worker."""
        return self._members[rank]

    def kind(self, rank: int) -> str:
        """Return the kind of machine a worker runs on: workers of one kind share one curve."""
        name = self.names[rank]
        return HOST if name == HOST else self._context.devices[name].config.board

    def write_prepared(self) -> None:
        """Keep what the prepared workers told in the job's directory. Raises LocalError."""
        ready = {member.name: member.ready for member in self._members if member.worker}
        found = {name: _described(each) for name, each in ready.items() if each}
        try:
            artifacts.write(self._directory, PreparedWorkers(found))
        except OSError as error:  # a full disk, most likely
            raise LocalError(f"{self._directory}: {error.strerror}") from None

    @property
    def prepared(self) -> float:
        """The part of the workers that are prepared, or out of the job, 0 to 1."""
        return sum(bool(one.worker or one.failure) for one in self._members) / max(1, len(self._members))

    @property
    def _run(self) -> str:
        """The name of this job, which no other has, also none of an earlier database."""
        return run_name(self._row.id, self._row.created)

    @property
    def local(self) -> LocalRule:
        """The part of the job's strategy in local training."""
        return self._work.local

    @property
    def rosters(self) -> str:
        """One line about whom the devices mask their updates for."""
        ready = {member.name: member.ready for member in self._members if member.ready}
        open_ = [name for name, each in ready.items() if not each.pinned]
        least = max((each.least_devices for each in ready.values()), default=0)
        told = f"updates are masked: the host learns sums of {least} devices and more"
        if not open_:
            rosters = sorted({each.roster for each in ready.values()} - {0})
            if not rosters:
                return f"{told}, of cohorts that the devices have pinned"
            numbers = ", ".join(map(str, rosters))
            return f"{told}, of roster {numbers}, which owners of the devices have signed"
        return f"{told}; against a curious host alone, as no policy.cohort is pinned on {', '.join(open_)}"

    @property
    def reasons(self) -> str:
        """The reasons for the absence of workers, in one line."""
        return listed((member.name, member.reason) for member in self._members if not member.worker)

    def _wait_for_devices(self, resumed: bool) -> tuple[str, ...]:
        """Wait for the devices, and return the names of the ready ones. Raises JobFailed if none is ready."""
        devices, deadline = self._context.devices, Deadline.after(START_SECONDS)
        last = Deadline.after(self._job.limits.wait)
        # after a power cut, boards may start slowly: a resumed job waits for the first of them
        while not all(device.wait_ready(Deadline.after(0.2)) for device in devices.values()):
            self.check_stop()
            some = any(device.status.state is DeviceState.READY for device in devices.values())
            if (deadline.passed and (some or not resumed)) or last.passed:
                break
        present = tuple(name for name, device in devices.items() if device.wait_ready(Deadline.after(0.01)))
        if not present:
            reasons = ", ".join(f"{name}: {device.status.reason}" for name, device in devices.items())
            raise JobFailed(f"no device is ready ({reasons or 'the fleet is empty'})")
        return present

    def _wait_prepared(self, supervisor: WorkerSupervisor) -> None:
        """Wait until a worker is prepared, lost or out of the job, or its device is absent for
        START_SECONDS.
        """
        device = self._context.devices.get(supervisor.name)
        gone: Deadline | None = None
        while not supervisor.wait_settled(Deadline.after(0.5)):
            self.check_stop()
            if device is None or device.wait_ready(Deadline.after(0.01)):
                gone = None
            elif (gone := gone or Deadline.after(START_SECONDS)).passed:
                break
        if supervisor.failure:
            self._log.warning("%s is out of the job: %s", supervisor.name, supervisor.failure)
        elif supervisor.ready:
            self._log.info("%s is prepared with %d samples", supervisor.name, supervisor.ready.samples)

    def _public_folders(self) -> tuple[Folder, ...] | None:
        """Return the folders of public data. Returns None while a volume is absent; after START_SECONDS the
        job goes on without that volume.
        """
        if self._job.data.is_streamed:
            return (self._streams.folder,)
        public, folders = self._job.data.public, []
        sources: tuple[str, ...] = self._sources if public is not None else ()
        if self._data:
            public, sources = self._data.path, (self._data.device,)
        for name in sources:
            device = self._context.devices.get(name)
            if device is None:
                self._log.warning("the public data of %s is left out: it is not in the fleet any more", name)
                continue
            try:
                if not device.wait_ready(Deadline.after(0.1)):
                    raise RemoteError(device.status.reason)
                folders.append(Folder(str(self._context.mount(name) / str(public)), name, public=True))
            except RemoteError as error:
                self._volume_deadline = self._volume_deadline or Deadline.after(START_SECONDS)
                if not self._volume_deadline.passed:
                    return None
                reason = reason_of(error, name)
                self._log.warning("the public data of %s is left out: %s", name, reason)
        self._volume_deadline = None  # each time the worker is prepared, volumes have the same time to come
        return tuple(folders)

    def check_stop(self) -> None:
        """Raise JobStopped if the job is to stop."""
        if self._stop.is_set():
            raise JobStopped("stopped")

    def wait(self, seconds: float) -> None:
        """Wait, at most until the job is to stop. Raises JobStopped."""
        self._stop.wait(seconds)
        self.check_stop()

    def stop(self) -> None:
        """Stop all workers, from any thread: calls to workers that are under way end at once."""
        with contextlib.ExitStack() as ends:
            ends.callback(self._overlay.close)
            ends.callback(self._streams.close)
            if self._server:
                ends.callback(self._server.close)
            for supervisor in self._members:
                ends.callback(supervisor.stop)
        shutil.rmtree(self._files.folder, ignore_errors=True)


def _described(ready: Ready) -> PreparedWorker:
    """Return the answer of a worker; its texts are a device's."""
    return PreparedWorker(ready.samples, sum(ready.held), ready.group, cleaned(ready.batch, LONGEST))


def host_trains(job: Job) -> bool:
    """Return whether the host has a worker in the job: public data, unless it only keeps the model."""
    return job.data.public is not None and (job.synchronous is None or job.synchronous.host)
