# SPDX-License-Identifier: Apache-2.0
"""Edge: the client of the host daemon: typed requests over its Unix socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, LocalError, ProtocolError, Refused
from millpond.host.api import daemon
from millpond.host.api.launch import LaunchEnded, LaunchOutput, LaunchSaved, StartLaunch
from millpond.host.fleet import directory as fleet
from millpond.host.fleet.directory import Fleet
from millpond.host.model.jobs import ACTIVE
from millpond.linux import sockets
from millpond.train.job.file import describe
from millpond.train.job.files import JobFile
from millpond.train.job.spec import Job
from millpond.train.protocol import FileContents, MissingFiles
from millpond.wire import tls
from millpond.wire.channel import Channel, FileSlice
from millpond.wire.control_messages import Attach, Ledger, Log, LogPosition
from millpond.wire.framing import Limits
from millpond.wire.launch_messages import SAVED_PART
from millpond.wire.messages import Failure, Message, Ok

R = TypeVar("R", bound=Message)
ANSWER_SECONDS = 30.0
TOPOLOGY_SECONDS = 600.0
SLOWEST = 1e6  # bytes per second, below which a transfer counts as stuck
INITIAL = "initial.safetensors"
"""The name of a copy of another job's model among a job's files."""
_LIMITS = Limits(head=64 << 20, payload=SAVED_PART)


class DaemonClient:
    """A connection to the daemon of a fleet. Raises LocalError where none runs."""

    def __init__(self, directory: Path) -> None:
        self.fleet: Fleet = fleet.read(directory)
        try:
            sock = sockets.connect(self.fleet.socket)
        except (FileNotFoundError, ConnectionRefusedError):
            raise LocalError(
                f"no host daemon runs for {directory}: start one with 'millpond emulate' or 'millpond host'"
            ) from None
        except OSError as error:
            raise LocalError(f"{self.fleet.socket}: {error.strerror}") from None
        self._channel = Channel(sock, "the host daemon", limits=_LIMITS)

    def __enter__(self) -> DaemonClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._channel.close()

    def _call(self, request: Message, reply: type[R], deadline: Deadline) -> R:
        """Return the daemon's answer; a refusal keeps its text, without the daemon's name before it."""
        try:
            return self._channel.call(request, reply, deadline)
        except ConnectionLost:
            raise ConnectionLost(daemon.ENDED) from None
        except Refused as error:
            raise Refused("", error.code, error.text) from None

    @property
    def _deadline(self) -> Deadline:
        return Deadline.after(ANSWER_SECONDS)

    def devices(self) -> tuple[daemon.DeviceInfo, ...]:
        """Return all devices of the fleet."""
        return self._call(daemon.GetDevices(), daemon.Devices, self._deadline).devices

    def tunnel(self, device: str) -> daemon.TunnelInfo:
        """Return the state of the host's endpoint of a device's tunnel."""
        return self._call(daemon.GetTunnel(device), daemon.TunnelInfo, self._deadline)

    def topology(self, size: int, root: str = "", repeats: int = 0) -> daemon.TopologyInfo:
        """Return the links of all ready devices, and what reductions of ``size`` values take over them."""
        request = daemon.GetTopology(size, root, repeats)
        return self._call(request, daemon.TopologyInfo, Deadline.after(TOPOLOGY_SECONDS))

    def ledgers(self) -> dict[str, Ledger]:
        """Return the privacy ledgers by device."""
        return self._call(daemon.GetLedgers(), daemon.Ledgers, self._deadline).ledgers

    def jobs(self) -> tuple[daemon.JobInfo, ...]:
        """Return all jobs."""
        return self._call(daemon.GetJobs(), daemon.JobList, self._deadline).jobs

    def job(self, number: int) -> daemon.JobRecord:
        """Return a job with its definition and its finished rounds."""
        return self._call(daemon.GetJob(number), daemon.JobRecord, self._deadline)

    def submit(self, job: Job, paths: Mapping[str, Path]) -> int:
        """Queue a job whose files lie at ``paths``, by name, and return its number. A job whose model begins
        with that of another job gets a copy of it.
        """
        if isinstance(job.code.initial, int):
            found = self.job(job.code.initial).info.model
            if not found:
                raise LocalError(f"{job.table}: initial: job {job.code.initial} has no model yet")
            paths = {**paths, INITIAL: Path(found)}
            code = replace(job.code, initial=INITIAL)
            job = replace(job, task=code) if job.task else replace(job, model=code)
        files = describe(paths, job.name)
        known = {file.sha256: (file, paths[name]) for name, file in files.items()}
        for digest in self._call(daemon.AnnounceFiles(files), MissingFiles, self._deadline).digests:
            self._send_file(*known[digest])
        return self._call(daemon.Submit(job, files), daemon.Submitted, self._deadline).id

    def _send_file(self, file: JobFile, path: Path) -> None:
        deadline = Deadline.after(ANSWER_SECONDS + file.size / SLOWEST)
        try:
            with path.open("rb") as opened:
                if os.fstat(opened.fileno()).st_size != file.size:
                    raise LocalError(f"{path}: it has changed meanwhile; submit the job again")
                contents = FileSlice(opened.fileno(), 0, file.size)
                self._channel.call(FileContents(file.sha256), Ok, deadline, contents)
        except OSError as error:
            raise LocalError(f"{path}: {error.strerror}") from None
        except Refused as error:
            raise Refused("", error.code, f"{path}: {error.text}") from None

    def watch(self, job: int) -> Iterator[daemon.JobProgress]:
        """Follow a job until it has ended."""
        self._channel.send(daemon.Watch(job), self._deadline)
        while True:
            progress = self._next_progress()
            yield progress
            if progress.info.state not in ACTIVE:
                return

    def _next_progress(self) -> daemon.JobProgress:
        try:
            return self._channel.expect(daemon.JobProgress, NEVER)
        except ConnectionLost:
            raise ConnectionLost(daemon.ENDED) from None
        except Refused as error:
            raise Refused("", error.code, error.text) from None

    def launch(
        self, request: StartLaunch
    ) -> Iterator[tuple[LaunchOutput | LaunchSaved | LaunchEnded, bytes]]:
        """Launch a script and follow it until all its workers have ended; they end with this connection.
        Yields messages, each with its payload.
        """
        self._channel.send(request, self._deadline)
        while True:
            try:
                head = self._channel.receive(NEVER)
                data = self._channel.receive_payload(SAVED_PART, self._deadline) if head.payload_size else b""
            except ConnectionLost:
                raise ConnectionLost("the host daemon has ended, and the script's workers with it") from None
            message = head.message
            if isinstance(message, Failure):
                raise Refused("", message.code, message.text)
            if not isinstance(message, (LaunchOutput, LaunchSaved, LaunchEnded)):
                raise ProtocolError(f"the host daemon sent '{message.NAME}' during a launch")
            yield message, bytes(data)
            if isinstance(message, LaunchEnded):
                return

    def log(self, target: str, lines: int) -> tuple[str, ...]:
        """Return the last lines of a device's or a job's log."""
        return self._call(daemon.GetLogOf(target, lines), Log, self._deadline).lines

    def new_log(self, target: str, lines: int, after: LogPosition | None) -> daemon.NewLog:
        """Return the lines of a device's or a job's log behind ``after``; without ``after`` the last
        ``lines``.
        """
        return self._call(daemon.GetNewLogOf(target, lines, after), daemon.NewLog, self._deadline)

    def curves(self, job: int) -> daemon.Curves:
        """Return the measured curves of a synchronous job's workers."""
        return self._call(daemon.GetCurves(job), daemon.Curves, self._deadline)

    def prepared(self, job: int) -> daemon.PreparedWorkers:
        """Return the workers of a job without rounds that is done."""
        return self._call(daemon.GetPrepared(job), daemon.PreparedWorkers, self._deadline)

    def stop(self, job: int) -> None:
        """Stop a job and wait until it has stopped."""
        self._call(daemon.StopJob(job), Ok, Deadline.after(2 * ANSWER_SECONDS))

    def resume(self, job: int, rounds: int | None = None) -> None:
        """Resume a job that was stopped or has failed, or continue a done one up to ``rounds`` rounds."""
        self._call(daemon.ResumeJob(job, rounds), Ok, self._deadline)

    def dial(self, device: str, port: int) -> socket.socket:
        """Return a TCP connection to the device's port, through its tunnel."""
        self._call(daemon.Dial(device, port), Ok, self._deadline)
        return self._receive_socket()

    def volume(self, device: str, deadline: Deadline) -> Channel:
        """Return an attached connection to the device's volume."""
        grant = self._call(daemon.GetVolume(device), daemon.VolumeTicket, deadline)
        sock = self._receive_socket()
        if grant.tls:
            sock = tls.connect(sock, self.fleet.identity.context(server=False), device, deadline)
        channel = Channel(sock, device)
        channel.call(Attach(grant.token), Ok, deadline)
        return channel

    def _receive_socket(self) -> socket.socket:
        self._channel.sock.settimeout(ANSWER_SECONDS)
        return socket.socket(fileno=sockets.receive_descriptors(self._channel.sock, 1)[0])
