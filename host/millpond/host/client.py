"""Edge: the host daemon as commands see it: typed questions over its Unix socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, LocalError, ProtocolError, Refused
from millpond.host.api import daemon
from millpond.host.api.launch import LaunchEnded, LaunchOutput, StartLaunch
from millpond.host.fleet import directory as fleet
from millpond.host.fleet.directory import Fleet
from millpond.linux import sockets
from millpond.train.job.spec import Job
from millpond.wire import tls
from millpond.wire.channel import Channel
from millpond.wire.control_messages import Attach, Ledger, Log, LogPosition
from millpond.wire.framing import Limits
from millpond.wire.messages import Failure, Message, Ok

R = TypeVar("R", bound=Message)
ANSWER_SECONDS = 30.0
_LIMITS = Limits(head=64 << 20, payload=0)


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

    def _ask(self, request: Message, reply: type[R], deadline: Deadline) -> R:
        """The daemon's answer; its refusals are told as they are, without saying that it was the daemon."""
        try:
            return self._channel.call(request, reply, deadline)
        except Refused as error:
            raise Refused("", error.code, error.text) from None

    @property
    def _deadline(self) -> Deadline:
        return Deadline.after(ANSWER_SECONDS)

    def devices(self) -> tuple[daemon.DeviceInfo, ...]:
        """All devices of the fleet."""
        return self._ask(daemon.GetDevices(), daemon.Devices, self._deadline).devices

    def tunnel(self, device: str) -> daemon.TunnelInfo:
        """The host's end of a device's tunnel."""
        return self._ask(daemon.GetTunnel(device), daemon.TunnelInfo, self._deadline)

    def ledgers(self) -> dict[str, Ledger]:
        """The privacy ledgers by device."""
        return self._ask(daemon.GetLedgers(), daemon.Ledgers, self._deadline).ledgers

    def jobs(self) -> tuple[daemon.JobInfo, ...]:
        """All jobs."""
        return self._ask(daemon.GetJobs(), daemon.JobList, self._deadline).jobs

    def submit(self, job: Job, code: dict[str, str]) -> int:
        """Start a job; returns its number."""
        return self._ask(daemon.Submit(job, code), daemon.Submitted, self._deadline).id

    def watch(self, job: int) -> Iterator[daemon.JobProgress]:
        """Follow a job until it has ended."""
        self._channel.send(daemon.Watch(job), self._deadline)
        while True:
            progress = self._next_progress()
            yield progress
            if progress.info.state != "running":
                return

    def _next_progress(self) -> daemon.JobProgress:
        try:
            return self._channel.expect(daemon.JobProgress, NEVER)
        except Refused as error:
            raise Refused("", error.code, error.text) from None

    def launch(self, request: StartLaunch) -> Iterator[LaunchOutput | LaunchEnded]:
        """Launch a script and follow it until all its workers have ended; they end with this connection."""
        self._channel.send(request, self._deadline)
        while True:
            try:
                message = self._channel.receive(NEVER).message
            except ConnectionLost:
                raise ConnectionLost("the host daemon has ended, and the script's workers with it") from None
            if isinstance(message, Failure):
                raise Refused("", message.code, message.text)
            if not isinstance(message, (LaunchOutput, LaunchEnded)):
                raise ProtocolError(f"the host daemon sent '{message.NAME}' during a launch")
            yield message
            if isinstance(message, LaunchEnded):
                return

    def log(self, target: str, lines: int) -> tuple[str, ...]:
        """The last lines of a device's or a job's log."""
        return self._ask(daemon.GetLogOf(target, lines), Log, self._deadline).lines

    def new_log(self, target: str, lines: int, after: LogPosition | None) -> daemon.NewLog:
        """What a device's or a job's log has more than at ``after``; without it the last lines."""
        return self._ask(daemon.GetNewLogOf(target, lines, after), daemon.NewLog, self._deadline)

    def curves(self, job: int) -> daemon.Curves:
        """What the workers of a synchronous job were measured to do."""
        return self._ask(daemon.GetCurves(job), daemon.Curves, self._deadline)

    def stop(self, job: int) -> None:
        """Stop a job and wait until it has."""
        self._ask(daemon.StopJob(job), Ok, Deadline.after(2 * ANSWER_SECONDS))

    def dial(self, device: str, port: int) -> socket.socket:
        """A TCP connection to the device's port, through its tunnel."""
        self._ask(daemon.Dial(device, port), Ok, self._deadline)
        return self._receive_socket()

    def volume(self, device: str, deadline: Deadline) -> Channel:
        """An attached connection to the device's volume."""
        grant = self._ask(daemon.GetVolume(device), daemon.VolumeTicket, deadline)
        sock = self._receive_socket()
        if grant.tls:
            sock = tls.connect(sock, self.fleet.identity.context(server=False), device, deadline)
        channel = Channel(sock, device)
        channel.call(Attach(grant.token), Ok, deadline)
        return channel

    def _receive_socket(self) -> socket.socket:
        self._channel.sock.settimeout(ANSWER_SECONDS)
        return socket.socket(fileno=sockets.receive_descriptors(self._channel.sock, 1)[0])
