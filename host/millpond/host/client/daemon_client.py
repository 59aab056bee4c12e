# SPDX-License-Identifier: Apache-2.0
"""Edge: the client of the host daemon: typed requests over its Unix socket."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ProtocolError, Refused, RemoteError
from millpond.host.api import audit, daemon
from millpond.host.api.launch import (
    LaunchEnded,
    LaunchInput,
    LaunchInputsEnd,
    LaunchNews,
    StartLaunch,
)
from millpond.host.api.progress import JobProgress, JobRecord, StoredJob, StoredProgress
from millpond.host.api.questions import AskFleet, FleetAnswer
from millpond.host.api.topology import GetTopology, TopologyInfo
from millpond.host.client.connection import ANSWER_SECONDS
from millpond.host.client.submission import JobSubmission
from millpond.host.records.jobs import ACTIVE
from millpond.host.records.stored_rounds import read_rounds
from millpond.linux import sockets
from millpond.train.distributed.launch_messages import SAVED_PART
from millpond.wire.control_messages import AuditEntries, AuditHead, Ledger, LogPosition
from millpond.wire.framing import Limits
from millpond.wire.messages import Failure, Ok

TOPOLOGY_SECONDS = PRUNE_SECONDS = 600.0


class DaemonClient(JobSubmission):
    """A connection to the daemon of a fleet. Raises LocalError where none runs."""

    LIMITS = Limits(head=64 << 20, payload=SAVED_PART)

    def devices(self) -> tuple[daemon.DeviceInfo, ...]:
        """Return all devices of the fleet."""
        return self.overview().devices

    def overview(self) -> daemon.Devices:
        """Return all devices of the fleet, and warnings about it."""
        return self._call(daemon.GetDevices(), daemon.Devices, self._deadline)

    def add_device(self, device: str) -> None:
        """Have the daemon take a device that ``fleet.toml`` has since it was started."""
        self._call(daemon.AddDevice(device), Ok, self._deadline)

    def remove_device(self, device: str) -> None:
        """Have the daemon forget a device. Raises Refused while a job or a launch uses it."""
        self._call(daemon.RemoveDevice(device), Ok, self._deadline)

    def tunnel(self, device: str) -> daemon.TunnelInfo:
        """Return the state of the host's endpoint of a device's tunnel."""
        return self._call(daemon.GetTunnel(device), daemon.TunnelInfo, self._deadline)

    def topology(self, size: int, root: str = "", repeats: int = 0) -> TopologyInfo:
        """Return the links of all ready devices, and what reductions of ``size`` values take over them."""
        request = GetTopology(size, root, repeats)
        return self._call(request, TopologyInfo, Deadline.after(TOPOLOGY_SECONDS))

    def ask(self, request: AskFleet) -> FleetAnswer:
        """Return the answer of the fleet's devices to a question. Raises Refused if too few answer."""
        return self._call(request, FleetAnswer, NEVER)

    def ledgers(self, device: str = "") -> dict[str, Ledger]:
        """Return the privacy ledgers by device, of all devices that are ready or of one that is."""
        return self._call(daemon.GetLedgers(device), daemon.Ledgers, self._deadline).ledgers

    def send_roster(self, device: str, text: str) -> None:
        """Send a device the text of a roster's file. Raises Refused with the device's reason."""
        self._call(daemon.SendRoster(device, text), Ok, self._deadline)

    def audit_head(self, device: str, nonce: str = "") -> AuditHead:
        """Return the head of a device's audit log, signed if there is a ``nonce``."""
        return self._call(audit.GetAuditHeadOf(device, nonce), AuditHead, self._deadline)

    def audit_entries(self, device: str, first: int) -> tuple[str, ...]:
        """Return lines of a device's audit log from the entry ``first`` on."""
        return self._call(audit.GetAuditEntriesOf(device, first), AuditEntries, self._deadline).lines

    def jobs(self, last: int = daemon.MOST_LISTED) -> tuple[daemon.JobInfo, ...]:
        """Return the ``last`` jobs, oldest first."""
        found: tuple[daemon.JobInfo, ...] = ()
        while (left := last - len(found)) > 0:
            request = daemon.GetJobs(min(left, daemon.MOST_LISTED), found[0].id if found else 0)
            part = self._call(request, daemon.JobList, self._deadline).jobs
            found = part + found
            if len(part) < request.most:
                break
        return found

    def job_info(self, number: int) -> daemon.JobInfo:
        """Return one job. Raises Refused for an unknown one."""
        found = self._call(daemon.GetJobs(1, number + 1), daemon.JobList, self._deadline).jobs
        if not found or found[0].id != number:
            raise Refused("", "unknown", f"there is no job {number}")
        return found[0]

    def job(self, number: int, *, rounds: bool = True) -> JobRecord:
        """Return a job with its definition and, if ``rounds``, its finished rounds."""
        request = daemon.GetJob(number, 0 if rounds else daemon.LARGEST_NUMBER)
        found = self._call(request, StoredJob, self._deadline)
        finished = list(found.rounds)
        while found.more:
            request = daemon.GetJob(number, finished[-1].round)
            found = self._call(request, StoredJob, self._deadline)
            finished += found.rounds
        return JobRecord(found.info, found.job, found.code, read_rounds(number, finished))

    def watch(self, job: int) -> Iterator[JobProgress]:
        """Follow a job until it has ended."""
        self._channel.send(daemon.Watch(job), self._deadline)
        while True:
            progress = self._next_progress()
            yield progress
            if progress.info.state not in ACTIVE and not progress.more:
                return

    def _next_progress(self) -> JobProgress:
        with self._told_truly():
            return self._channel.expect(StoredProgress, NEVER).read()

    def launch(
        self,
        request: StartLaunch,
        inputs: Iterable[tuple[LaunchInput, bytes]] = (),
        shared: int | None = None,
    ) -> Iterator[tuple[LaunchNews, bytes]]:
        """Launch a script and follow it until all its workers have ended; they end with this connection.
        ``inputs`` are parts of files, and ``shared`` is an open folder, if the request has such. Yields
        messages, each with its payload.
        """
        self._channel.send(request, self._deadline)
        if shared is not None:
            sockets.send_descriptors(self._channel.sock, [shared])
        if request.inputs:
            for part, content in inputs:
                self._channel.send(part, self._deadline, content)
            self._channel.send(LaunchInputsEnd(), self._deadline)
        while True:
            with self._told_truly("the host daemon has ended, and the script's workers with it"):
                head = self._channel.receive(NEVER)
                data = self._channel.receive_payload(SAVED_PART, self._deadline) if head.payload_size else b""
            message = head.message
            if isinstance(message, Failure):
                raise Refused("", message.code, message.text)
            if not isinstance(message, LaunchNews):
                raise ProtocolError(f"the host daemon sent '{message.NAME}' during a launch")
            yield message, bytes(data)
            if isinstance(message, LaunchEnded):
                return

    def log(self, target: str, lines: int) -> tuple[str, ...]:
        """Return the last lines of a device's or a job's log. Raises RemoteError for an absent device."""
        found = self.new_log(target, lines, None)
        if found.gone:
            raise RemoteError(f"{target}: {found.gone.removeprefix(f'{target}: ')}")
        return found.lines

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

    def prune(
        self, keep: int | None, older_than: float | None, *, dry_run: bool, forget: bool = False
    ) -> tuple[daemon.PrunedJob, ...]:
        """Remove the folders of ended jobs but the ``keep`` newest and those that have ended within the last
        ``older_than`` seconds, or without both those beyond the fleet's limits; with ``dry_run`` none. With
        ``forget`` they leave the list, too.
        """
        request = daemon.PruneJobs(keep, older_than, dry_run, forget)
        return self._call(request, daemon.PrunedJobs, Deadline.after(PRUNE_SECONDS)).jobs

    def forget_job(self, number: int) -> None:
        """Remove an ended job, from the list too."""
        self._call(
            daemon.PruneJobs(forget=True, only=number), daemon.PrunedJobs, Deadline.after(PRUNE_SECONDS)
        )

    def dial(self, device: str, port: int) -> socket.socket:
        """Return a TCP connection to the device's port, through its tunnel."""
        self._call(daemon.Dial(device, port), Ok, self._deadline)
        return self._receive_socket()
