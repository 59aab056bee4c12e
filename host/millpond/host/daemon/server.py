# SPDX-License-Identifier: Apache-2.0
"""Edge: the server of the daemon's Unix socket: answers commands, each connection in a thread of its own."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LocalError,
    MillpondError,
    ProtocolError,
    Refused,
    RemoteError,
    VersionMismatch,
)
from millpond.base.sizes import SLOWEST
from millpond.base.text import LONGEST, printable
from millpond.host.api import audit, daemon, progress
from millpond.host.api.connection import GetVolume, VolumeTicket
from millpond.host.api.launch import StartLaunch
from millpond.host.api.outer import GetOuterModel, OuterOrder
from millpond.host.api.questions import AskFleet
from millpond.host.api.topology import GetTopology
from millpond.host.daemon import question_requests
from millpond.host.daemon.outer_requests import OuterRequests
from millpond.host.daemon.places import UserPlace, UserPlaces, most_places
from millpond.host.fleet import expiry, worker_user
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.fleet.registry import DeviceRegistry
from millpond.host.jobs.handed_folders import HandedFolders
from millpond.host.jobs.service import JobService
from millpond.host.launch.service import LaunchService
from millpond.host.workers import topology_report
from millpond.linux import sockets
from millpond.train.job import signed_code
from millpond.train.job.check import check
from millpond.train.job.file_cache import FileCache
from millpond.train.job.files import JobFile, check_job_files, contents
from millpond.train.job.host_spec import TrackSpec
from millpond.train.job.spec import Job
from millpond.train.protocol import FileContents, MissingFiles
from millpond.wire.acceptor import Acceptor
from millpond.wire.audit_log import LONGEST_LINE, PAGE_BYTES
from millpond.wire.channel import Channel
from millpond.wire.control_messages import (
    CONTROL_PORT,
    SENDERS,
    AuditEntries,
    AuditHead,
    GetAuditEntries,
    GetAuditHead,
    GetLedger,
    GetLog,
    GetTicket,
    Ledger,
    Log,
    SetRoster,
    Ticket,
)
from millpond.wire.framing import Limits
from millpond.wire.messages import Failure, Message, Ok
from millpond.wire.texts import cleaned

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Message)
REPLY_SECONDS = 10.0
MESSAGE_SECONDS = 30.0
_MOST_LEDGER, _LONGEST_NAME = 512, 64  # more counters than an agent has, see LedgerCounters
"""Time in which a request that has begun to come is whole."""
MOST_VALUES, MOST_REPEATS = 1 << 26, 100
_WITH_PAYLOAD = FileContents | daemon.SmallFiles | OuterOrder
Traffic = Callable[[], dict[str, tuple[int, int]]]


class DaemonServer:
    """Answers on the fleet's socket until ``close``; members of the ``group`` (gid) may connect, too. ``add``
    has the daemon take a device.
    """

    def __init__(
        self,
        fleet: Fleet,
        devices: DeviceRegistry,
        jobs: JobService,
        files: FileCache,
        launches: LaunchService,
        traffic: Traffic,
        between: Callable[[Sequence[str]], AbstractContextManager[object]],
        add: Callable[[str], None],
        group: int | None = None,
    ) -> None:
        self._fleet, self._devices, self._jobs, self._traffic = fleet, devices, jobs, traffic
        self._files, self._launches, self._between, self._add = files, launches, between, add
        self._folders = HandedFolders(fleet.test_data, files)
        self._group, self._outer = group, OuterRequests(jobs)
        self._places = UserPlaces(os.geteuid(), most_places())
        self._acceptor, self._told = self._listen(), ""

    def _listen(self) -> Acceptor:
        mode = 0o600 if self._group is None else 0o660
        server = sockets.listen(self._fleet.socket, mode=mode, group=self._group)
        self._file = self._fleet.socket.stat().st_ino
        return Acceptor(server, self._enter, places=3 * self._places.most, name="commands")

    def mend(self) -> None:
        """Listen on a new socket if something has removed the file of the old one."""
        told, self._told = self._told, ""
        try:
            with contextlib.suppress(FileNotFoundError):
                if self._fleet.socket.stat().st_ino == self._file:
                    return
            replaced, self._acceptor = self._acceptor, self._listen()
        except OSError as error:
            self._told = error.strerror or str(error)
            if self._told != told:
                log.warning("%s is not there, and cannot be made anew: %s", self._fleet.socket, self._told)
            return
        replaced.close()
        log.warning("%s was removed: there is a new one", self._fleet.socket)

    def close(self) -> None:
        """Answer no more, and remove the socket."""
        self._acceptor.close()
        self._fleet.socket.unlink(missing_ok=True)

    def _enter(self, connection: socket.socket) -> None:
        with Channel(connection, "a command", limits=Limits(head=4 << 20, payload=1 << 44)) as client:
            try:
                with self._places.enter(connection, sockets.peer_uid(connection)) as place:
                    self._serve(client, place)
            except VersionMismatch as error:
                self._say(client, Failure("version", str(error)))  # its head names the daemon's version
            except Refused as error:
                self._say(client, Failure(error.code, error.text))
            except (RemoteError, OSError) as error:
                log.debug("connection ended: %s", error)

    def _say(self, client: Channel, failure: Failure) -> None:
        with contextlib.suppress(RemoteError):
            client.send(failure, Deadline.after(REPLY_SECONDS))

    def _serve(self, client: Channel, place: UserPlace) -> None:
        while True:
            sockets.readable([client.sock])
            head = client.receive(Deadline.after(MESSAGE_SECONDS))
            if head.payload_size and not isinstance(head.message, _WITH_PAYLOAD):
                raise ProtocolError(f"'{head.message.NAME}' has no payload")
            with self._places.answering(place):
                self._answer(client, head.message)

    def _answer(self, client: Channel, request: Message) -> None:
        """Send the answer to a request: what its handler returns, or has sent itself, or a failure."""
        answer: Message | None
        try:
            handler = self._HANDLERS.get(type(request))
            if handler is None:
                raise Refused("", "protocol", f"'{request.NAME}' is not a command of this daemon")
            if type(request) in _OWNERS and not self._is_owner(client):
                raise Refused("", "state", f"{_OWNERS[type(request)]} is for the daemon's own user alone")
            answer = handler(self, client, request)
        except Refused as error:
            answer = Failure(error.code, str(error))
        except MillpondError as error:
            answer = Failure("local" if isinstance(error, LocalError) else "remote", str(error))
        except Exception as error:
            log.exception("'%s' failed", request.NAME)
            answer = Failure("internal", f"internal error: {error!r}")
        if answer is not None:
            client.send(answer, Deadline.after(REPLY_SECONDS))

    def _device(self, name: str) -> Device:
        device = self._devices.get(name)
        if device is None:
            known = ", ".join(self._devices) or "none"
            raise Refused("", "unknown", f"there is no device '{name}'; the fleet has {known}")
        return device

    def _get_devices(self, _client: Channel, _request: daemon.GetDevices) -> Message:
        traffic = self._traffic()
        found = []
        for name, device in self._devices.items():
            status = device.status
            address = self._fleet.addresses(name).device_ip
            found.append(
                daemon.DeviceInfo(
                    name,
                    device.config.board,
                    str(status.state),
                    status.reason,
                    address,
                    status.welcome,
                    status.load,
                    traffic.get(name, (0, 0)),
                    status.watts,
                )
            )
        warnings = expiry.warnings(self._fleet, datetime.datetime.now(datetime.UTC))
        return daemon.Devices(tuple(found), warnings)

    def _add_device(self, _client: Channel, request: daemon.AddDevice) -> Message:
        self._add(request.device)
        return Ok()

    def _remove_device(self, _client: Channel, request: daemon.RemoveDevice) -> Message:
        name = self._device(request.device).name
        with self._launches.without(name), self._jobs.without(name):
            device = self._devices.remove(name)
        device.stop()
        return Ok()

    def _get_topology(self, _client: Channel, request: GetTopology) -> Message:
        ready = {name: d for name, d in self._devices.items() if d.status.state is DeviceState.READY}
        if request.root and request.root not in ready:
            raise Refused("", "unknown", f"'{request.root}' is no device that is ready")
        if not (0 < request.size <= MOST_VALUES and 0 <= request.repeats <= MOST_REPEATS):
            raise Refused("", "size", f"at most {MOST_VALUES} values and {MOST_REPEATS} repeats")
        lan = all(device.config.lan for device in ready.values())
        with contextlib.nullcontext() if lan else self._between(list(ready)):
            return topology_report.report(ready, request)

    def _ask(self, _client: Channel, request: AskFleet) -> Message:
        devices = {name: self._device(name) for name in request.devices or self._devices}
        return question_requests.answer(devices, self._jobs, self._files, request)

    def _dial(self, client: Channel, request: daemon.Dial) -> None:
        with self._device(request.device).dial(request.port, Deadline.after(REPLY_SECONDS)) as sock:
            _send_with(client, Ok(), sock.fileno())

    def _get_volume(self, client: Channel, request: GetVolume) -> None:
        device, deadline = self._device(request.device), Deadline.after(REPLY_SECONDS)
        tls = device.config.encrypt == "always"
        with device.control(deadline) as agent:
            ticket = agent.call(GetTicket("volume", tls), Ticket, deadline)
        with device.dial(CONTROL_PORT, deadline) as sock:
            _send_with(client, VolumeTicket(ticket.token, ticket.tls), sock.fileno())

    def _get_ledgers(self, _client: Channel, request: daemon.GetLedgers) -> Message:
        asked = {request.device: self._device(request.device)} if request.device else self._devices
        ledgers = {}
        for name, device in asked.items():
            if device.status.state is DeviceState.READY:
                deadline = Deadline.after(REPLY_SECONDS)
                with contextlib.suppress(RemoteError), device.control(deadline) as agent:
                    ledgers[name] = _bounded(agent.call(GetLedger(), Ledger, deadline))
        return daemon.Ledgers(ledgers)

    def _get_audit_head(self, _client: Channel, request: audit.GetAuditHeadOf) -> Message:
        return self._asked(request.device, GetAuditHead(request.nonce), AuditHead)

    def _get_audit_entries(self, _client: Channel, request: audit.GetAuditEntriesOf) -> Message:
        found = self._asked(request.device, GetAuditEntries(request.first), AuditEntries)
        if sum(map(len, found.lines)) > PAGE_BYTES + LONGEST_LINE:
            raise ProtocolError(f"{request.device} sent more of its audit log than a message may have")
        return found

    def _send_roster(self, _client: Channel, request: daemon.SendRoster) -> Message:
        return self._asked(request.device, SetRoster(request.text), Ok)

    def _asked(self, device: str, request: Message, answer: type[R]) -> R:
        """Return a device's answer to a request of its own. Raises RemoteError."""
        deadline = Deadline.after(REPLY_SECONDS)
        with self._device(device).control(deadline) as agent:
            return agent.call(request, answer, deadline)

    def _announce_files(self, _client: Channel, request: daemon.AnnounceFiles) -> Message:
        check_job_files(request.files, "files")
        with self._files.held(request.files.values()):  # there is room for them
            missing = [
                digest for digest, file in contents(request.files).items() if not self._files.has(file)
            ]
        return MissingFiles(tuple(missing))

    def _look_for_folder(self, client: Channel, request: daemon.LookForFolder) -> Message:
        """Tell only the daemon's own user what it sees: it has more rights than others. What the jobs' user
        cannot read is handed over.
        """
        in_place = False
        if self._is_owner(client):
            with contextlib.suppress(OSError, ValueError):
                found = Path(request.path).stat()
                same = (found.st_dev, found.st_ino) == (request.device, request.inode)
                in_place = same and worker_user.can_read(Path(request.path))
        return daemon.FolderSeen(in_place)

    def _announce_folder(self, client: Channel, request: daemon.AnnounceFolder) -> Message:
        digest, owner = request.manifest.sha256, sockets.peer_uid(client.sock)
        return MissingFiles(() if self._folders.has(digest, owner) else (digest,))

    def _lay_out_folder(self, client: Channel, request: daemon.LayOutFolder) -> Message:
        self._folders.lay_out(request.manifest, sockets.peer_uid(client.sock))
        return Ok()

    def _take_file(self, client: Channel, request: FileContents) -> Message:
        file = JobFile(request.sha256, client.payload_left)
        with _payload(client) as parts:
            check_job_files({"file": file}, "files")
            self._files.add(file, parts)
        return Ok()

    def _take_small_files(self, client: Channel, request: daemon.SmallFiles) -> Message:
        size = client.payload_left
        with _payload(client) as parts:
            if size > daemon.SMALL_BYTES or len(request.files) > daemon.MOST_SMALL:
                raise ProtocolError("these are more small files than a message may have")
            check_job_files({file.sha256: file for file in request.files}, "files")
            self._files.add_small(request.files, b"".join(map(bytes, parts)))
        return Ok()

    def _submit(self, client: Channel, request: daemon.Submit) -> Message:
        check_job_files(request.files, "files")
        for name, file in request.files.items():
            if not self._files.has(file):
                raise Refused("", "files", f"the contents of '{name}' are not here; submit the job again")
        job = check(self._with_test_data(client, request), request.job.name)
        signed_code.check_signature_size(request.files.get(job.code.signature), request.job.name)
        number = self._jobs.submit(job, request.files, sockets.peer_uid(client.sock))
        return daemon.Submitted(number)

    def _with_test_data(self, client: Channel, request: daemon.Submit) -> Job:
        """Return the job with its test folder where the daemon reads it. Raises Refused for a path that its
        client has no right to name.
        """
        job, folder = request.job, request.job.data.test
        if request.test:
            owner = sockets.peer_uid(client.sock)
            if not self._folders.has(request.test, owner):
                raise Refused("", "files", "the test data are not here; submit the job again")
            folder = str(self._folders.path(request.test, owner))
        elif folder and not self._is_owner(client):
            raise Refused("", "files", "data: test: the daemon opens no folder for another user")
        return replace(job, data=replace(job.data, test=folder))

    def _is_owner(self, client: Channel) -> bool:
        """Return whether a client is of the daemon's own user, or of root."""
        return sockets.peer_uid(client.sock) in (0, os.geteuid())

    def _keep_model(self, _client: Channel, request: daemon.KeepModel) -> Message:
        return daemon.KeptModel(self._files.copy(self._jobs.model(request.job)))

    def _open_model(self, client: Channel, request: daemon.OpenModel) -> None:
        path = self._jobs.model(request.job, best=request.best)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LocalError(f"{path}: {error.strerror}") from None
        try:
            _send_with(client, Ok(), descriptor)
        finally:
            os.close(descriptor)

    def _get_jobs(self, _client: Channel, request: daemon.GetJobs) -> Message:
        most = max(0, min(request.most, daemon.MOST_LISTED))
        return daemon.JobList(self._jobs.infos(most, request.before))

    def _get_job(self, client: Channel, request: daemon.GetJob) -> Message:
        found = self._jobs.record(request.job, request.after)
        if found.info.owner == sockets.peer_uid(client.sock):
            return found
        # Trackers are written to by the user who follows a job: with more rights than the job's owner has.
        job = replace(found.job, track=TrackSpec())
        if not self._is_owner(client):
            job = replace(job, data=replace(job.data, test=""))
        return replace(found, job=job)

    def _watch(self, client: Channel, request: daemon.Watch) -> None:
        has_left = partial(sockets.has_left, client.sock)
        with contextlib.closing(self._jobs.follow(request.job, has_left)) as answers:
            for answer in answers:
                client.send_encoded(
                    progress.StoredProgress, answer.frame, NEVER
                )  # its reader may stand still, such as a pager

    def _launch(self, client: Channel, request: StartLaunch) -> None:
        self._launches.run(request, client)

    def _get_new_log(self, _client: Channel, request: daemon.GetNewLogOf) -> Message:
        if (job := daemon.job_number(request.target)) is not None:
            after = request.after.number if request.after else None
            return self._jobs.new_log(job, request.lines, after)
        return _new_log(self._device(request.target), request, Deadline.after(REPLY_SECONDS))

    def _stop(self, _client: Channel, request: daemon.StopJob) -> Message:
        self._jobs.stop(request.job)
        return Ok()

    def _resume(self, _client: Channel, request: daemon.ResumeJob) -> Message:
        self._jobs.restart(request.job, request.rounds)
        return Ok()

    _HANDLERS: Mapping[type[Message], Callable[..., Message | None]] = {
        daemon.GetDevices: _get_devices,
        daemon.AddDevice: _add_device,
        daemon.RemoveDevice: _remove_device,
        daemon.GetTunnel: lambda self, _client, request: self._device(request.device).tunnel(),
        GetTopology: _get_topology,
        AskFleet: _ask,
        daemon.Dial: _dial,
        GetVolume: _get_volume,
        daemon.GetLedgers: _get_ledgers,
        audit.GetAuditHeadOf: _get_audit_head,
        audit.GetAuditEntriesOf: _get_audit_entries,
        daemon.SendRoster: _send_roster,
        daemon.AnnounceFiles: _announce_files,
        FileContents: _take_file,
        daemon.SmallFiles: _take_small_files,
        daemon.LookForFolder: _look_for_folder,
        daemon.AnnounceFolder: _announce_folder,
        daemon.LayOutFolder: _lay_out_folder,
        daemon.Submit: _submit,
        daemon.KeepModel: _keep_model,
        daemon.OpenModel: _open_model,
        daemon.GetJobs: _get_jobs,
        daemon.GetJob: _get_job,
        daemon.Watch: _watch,
        daemon.GetNewLogOf: _get_new_log,
        daemon.GetCurves: lambda self, _client, request: self._jobs.curves(request.job),
        daemon.GetPrepared: lambda self, _client, request: self._jobs.prepared(request.job),
        daemon.StopJob: _stop,
        daemon.ResumeJob: _resume,
        daemon.PruneJobs: lambda self, _client, request: self._jobs.prune(request),
        StartLaunch: _launch,
        GetOuterModel: lambda self, client, request: self._outer.get_model(client, request),
        OuterOrder: lambda self, client, request: self._outer.order(client, request),
    }


_OWNERS: Mapping[type[Message], str] = {
    daemon.AddDevice: "the addition of a device",
    daemon.RemoveDevice: "the removal of a device",
    daemon.PruneJobs: "the removal of jobs' files",
    StartLaunch: "a launch",
}
"""The requests that members of the socket's group may not make."""


def _bounded(ledger: Ledger) -> Ledger:
    """Return what a device says has left it, in bounds: each name becomes a series where figures are kept."""
    sent, seen = (dict(islice(table.items(), _MOST_LEDGER)) for table in (ledger.sent, ledger.canaries))
    senders = {name: ledger.senders[name] for name in SENDERS if name in ledger.senders}
    return cleaned(Ledger(sent, seen, ledger.private_bytes, senders), _LONGEST_NAME)


def _send_with(client: Channel, answer: Message, descriptor: int) -> None:
    client.send(answer, Deadline.after(REPLY_SECONDS))
    sockets.send_descriptors(client.sock, [descriptor])


@contextlib.contextmanager
def _payload(client: Channel) -> Iterator[Iterator[memoryview]]:
    """Yield the parts of a request's payload, all of which are taken: else the rest would be taken for the
    next message.
    """
    parts = client.receive_parts(Deadline.after(REPLY_SECONDS + client.payload_left / SLOWEST))
    try:
        yield parts
    finally:
        for _ in parts:
            pass


def _new_log(device: Device, request: daemon.GetNewLogOf, deadline: Deadline) -> daemon.NewLog:
    """Return the lines that a device's agent has logged since. An absent device is no error: it may come
    back.
    """
    if device.status.state not in (DeviceState.READY, DeviceState.FAULTY):
        return daemon.NewLog(gone=device.status.reason or str(device.status.state))
    try:
        with device.control(deadline) as agent:
            found = agent.call(GetLog(request.lines, request.after), Log, deadline)
    except (ConnectionLost, DeadlineExceeded) as error:
        return daemon.NewLog(gone=printable(str(error)))
    if found.position is None:
        raise ProtocolError(f"the agent of {device.name} does not number the lines of its log")
    lost = 0
    if request.after:
        known = request.after.number if request.after.boot == found.position.boot else 0
        lost = max(0, found.position.number - known - len(found.lines))
    return cleaned(daemon.NewLog(found.lines, found.position, lost), LONGEST)
