# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages between commands and the host daemon, over the daemon's Unix socket."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.train.balance.profile import Profile
from millpond.train.job.files import JobFile
from millpond.train.job.spec import Job
from millpond.train.protocol import BatchPart
from millpond.tunnel.datapath.stats import PacketStats
from millpond.wire.control_messages import Ledger, Load, LogPosition, Welcome
from millpond.wire.messages import Message, message

MOST_SMALL, SMALL_BYTES = 1024, 1 << 20
MOST_LISTED = 200
_LONGEST_NUMBER = 30
LARGEST_NUMBER = (1 << 63) - 1
"""The largest number that a job could have."""


def job_number(text: str) -> int | None:
    """Return the number of a job, which need not be there, None for another text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _LONGEST_NUMBER else None


@message("api.devices.get")
@dataclass(frozen=True, slots=True)
class GetDevices(Message):
    """Ask for Devices."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device now; ``tunnel`` is the bytes (to, from) that crossed its tunnel's interface on the host,
    ``watts`` its recent power.
    """

    name: str
    board: str
    state: str
    reason: str
    address: str
    welcome: Welcome | None
    load: Load | None
    tunnel: tuple[int, int]
    watts: float | None = None


@message("api.devices")
@dataclass(frozen=True, slots=True)
class Devices(Message):
    """All devices of the fleet, and ``warnings`` of certificates that end soon."""

    devices: tuple[DeviceInfo, ...]
    warnings: tuple[str, ...] = ()


@message("api.tunnel.get")
@dataclass(frozen=True, slots=True)
class GetTunnel(Message):
    """Ask for the TunnelInfo of a device."""

    device: str


@message("api.tunnel")
@dataclass(frozen=True, slots=True)
class TunnelInfo(Message):
    """The host's endpoint of a device's tunnel now; ``state`` is up or down, ``reason`` says why it is down.

    ``confinement`` is that of the pumps, "on" or why it is off. ``to_device`` and ``from_device`` count since
    the endpoint was started, at ``time`` (s, of a steady clock). The other figures are of the present link of
    the tunnel, or the last.
    """

    device: str
    state: str
    reason: str
    time: float
    generation: int
    mtu: int
    depth: int
    offloads: int
    engine: str
    confinement: str
    resets: int
    to_device: PacketStats
    from_device: PacketStats


@message("api.device.add")
@dataclass(frozen=True, slots=True)
class AddDevice(Message):
    """Take a device that is in ``fleet.toml`` since the daemon was started; answered by Ok."""

    device: str


@message("api.device.remove")
@dataclass(frozen=True, slots=True)
class RemoveDevice(Message):
    """Forget a device that no job and no launch uses, and end its tunnel; answered by Ok."""

    device: str


@message("api.roster.send")
class SendRoster(Message):
    """Send a device the text of a roster that owners have signed, see SetRoster; answered by Ok, or by the
    device's refusal.
    """

    device: str
    text: str


@message("api.dial")
@dataclass(frozen=True, slots=True)
class Dial(Message):
    """Ask for a TCP connection to a device's port: answered by Ok, then the socket's descriptor."""

    device: str
    port: int


@message("api.ledgers.get")
@dataclass(frozen=True, slots=True)
class GetLedgers(Message):
    """Ask for Ledgers, for that of one ``device`` alone, or ("") for those of all."""

    device: str = ""


@message("api.ledgers")
@dataclass(frozen=True, slots=True)
class Ledgers(Message):
    """The privacy ledgers of the devices that are ready, by name."""

    ledgers: dict[str, Ledger]


@message("api.files")
@dataclass(frozen=True, slots=True)
class AnnounceFiles(Message):
    """Announce the files of a job, by name; answered by MissingFiles, whose contents are to follow."""

    files: dict[str, JobFile]


@message("api.files.small")
@dataclass(frozen=True, slots=True)
class SmallFiles(Message):
    """Payload: the contents of at most MOST_SMALL ``files``, one behind the other, in SMALL_BYTES or less.
    All are stored, or none; answered by Ok.
    """

    files: tuple[JobFile, ...]


@message("api.folder.look")
@dataclass(frozen=True, slots=True)
class LookForFolder(Message):
    """Ask whether the daemon sees at ``path`` the folder with these numbers, and may open it for this client;
    answered by FolderSeen.
    """

    path: str
    device: int
    inode: int


@message("api.folder.seen")
@dataclass(frozen=True, slots=True)
class FolderSeen(Message):
    """Whether the daemon reads the folder in its place."""

    in_place: bool


@message("api.folder")
@dataclass(frozen=True, slots=True)
class AnnounceFolder(Message):
    """Announce a folder by its manifest; answered by MissingFiles, of none where the folder is laid out."""

    manifest: JobFile


@message("api.folder.lay.out")
@dataclass(frozen=True, slots=True)
class LayOutFolder(Message):
    """Lay out a folder whose manifest and contents the daemon has; answered by Ok."""

    manifest: JobFile


@message("api.submit")
@dataclass(frozen=True, slots=True)
class Submit(Message):
    """Queue a job with ``files`` by name, whose contents the daemon has; answered by Submitted. ``test`` is
    the digest of the manifest of its test folder, "" where the daemon reads that in its place.
    """

    job: Job
    files: dict[str, JobFile]
    test: str = ""


@message("api.submitted")
@dataclass(frozen=True, slots=True)
class Submitted(Message):
    """The job's number."""

    id: int


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job now: ``round`` is its last finished one, of ``rounds``; ``unit`` is its name for a round, times
    are Unix seconds. ``metric`` decides which model is the best: ``score`` is its last value, ``best`` that
    of ``best_round``, None before the first. ``reason`` says what an active job waits for. ``waits`` is the
    share of its time in which each worker waited for data in the last rounds, 0 for less than half a second
    of waiting. Its files are gone since it was
    ``pruned``. ``owner`` is the uid of the user who has submitted it, None where that is not known. A running
    job is in a ``stage`` ("preparing", "training" the present round, "scoring" it, or, if it is resident,
    "waiting for an order"), of which the part ``done`` is, 0 to 1.
    """

    id: int
    name: str
    state: str
    error: str
    model: str
    round: int
    rounds: int
    unit: str
    metric: str
    score: float | None
    best: float | None
    best_round: int
    created: float
    ended: float | None
    devices: tuple[str, ...] = ()
    priority: int = 0
    reason: str = ""
    waits: dict[str, float] = field(default_factory=dict)
    pruned: float | None = None
    owner: int | None = None
    stage: str = ""
    done: float = 0.0

    @property
    def rounds_left(self) -> float:
        """The rounds that are to come, without the part of the present one that is done."""
        return max(0.0, self.rounds - self.round - self.done)


@message("api.jobs.get")
@dataclass(frozen=True, slots=True)
class GetJobs(Message):
    """Ask for the newest ``most`` jobs, at most MOST_LISTED, with numbers below ``before`` (0: any); answered
    by JobList.
    """

    most: int = MOST_LISTED
    before: int = 0


@message("api.jobs")
@dataclass(frozen=True, slots=True)
class JobList(Message):
    """Jobs, oldest first."""

    jobs: tuple[JobInfo, ...]


@message("api.job.get")
@dataclass(frozen=True, slots=True)
class GetJob(Message):
    """Ask for the StoredJob of a job, with the first of its rounds behind round ``after``."""

    job: int
    after: int = 0


@message("api.watch")
@dataclass(frozen=True, slots=True)
class Watch(Message):
    """Follow a job from its first round: answered by StoredProgress until one has an ended job."""

    job: int


@message("api.log.new.get")
@dataclass(frozen=True, slots=True)
class GetNewLogOf(Message):
    """Ask for the lines of the log of a device (by name) or a job (by number) behind ``after``, or without it
    the last lines; answered by NewLog.
    """

    target: str
    lines: int
    after: LogPosition | None = None


@message("api.log.new")
@dataclass(frozen=True, slots=True)
class NewLog(Message):
    """The lines between two positions, without the ``lost`` ones that the agent had dropped. ``gone`` is the
    reason for a device's absence; ``ended`` is true at the end of a job's log.
    """

    lines: tuple[str, ...] = ()
    position: LogPosition | None = None
    lost: int = 0
    gone: str = ""
    ended: bool = False


@message("api.curves.get")
@dataclass(frozen=True, slots=True)
class GetCurves(Message):
    """Ask for the Curves of a synchronous job."""

    job: int


@message("api.curves")
@dataclass(frozen=True, slots=True)
class Curves(Message):
    """The measured curves of the workers of a job, and the batch of each in its first plan."""

    profiles: tuple[Profile, ...]
    batches: dict[str, int]


@message("api.prepared.get")
@dataclass(frozen=True, slots=True)
class GetPrepared(Message):
    """Ask for the PreparedWorkers of a job without rounds."""

    job: int


@dataclass(frozen=True, slots=True)
class PreparedWorker:
    """The answer of a prepared worker: ``samples`` to train on, in groups of ``group``, and those that are
    ``held`` out besides; the parts of a ``batch``.
    """

    samples: int
    held: int
    group: int
    batch: tuple[BatchPart, ...]


@message("api.prepared")
@dataclass(frozen=True, slots=True)
class PreparedWorkers(Message):
    """The workers of a job without rounds, by name."""

    workers: dict[str, PreparedWorker]


@message("api.model.keep")
@dataclass(frozen=True, slots=True)
class KeepModel(Message):
    """Ask for a copy of a job's model among the contents of files; answered by KeptModel."""

    job: int


@message("api.model.kept")
@dataclass(frozen=True, slots=True)
class KeptModel(Message):
    """The model's contents."""

    file: JobFile


@message("api.model.open")
@dataclass(frozen=True, slots=True)
class OpenModel(Message):
    """Ask for a job's model, or for that of the ``best`` score; answered by Ok, then a descriptor of it."""

    job: int
    best: bool = False


@message("api.resume")
@dataclass(frozen=True, slots=True)
class ResumeJob(Message):
    """Resume an ended job, up to ``rounds`` rounds or epochs if given; answered by Ok when it is queued."""

    job: int
    rounds: int | None = None


@message("api.prune")
@dataclass(frozen=True, slots=True)
class PruneJobs(Message):
    """Remove the folders of ended jobs, but the ``keep`` newest and those that have ended within the last
    ``older_than`` seconds; without both, those beyond the limits of the fleet. With ``forget`` such jobs
    leave the list, also those whose folders are gone already. With ``dry_run`` none is removed. ``only`` is
    the one job that is meant, 0 for all. Answered by PrunedJobs.
    """

    keep: int | None = None
    older_than: float | None = None
    dry_run: bool = False
    forget: bool = False
    only: int = 0


@dataclass(frozen=True, slots=True)
class PrunedJob:
    """An ended job whose folder, of so many bytes, is removed or would be."""

    id: int
    name: str
    bytes: int


@message("api.pruned")
@dataclass(frozen=True, slots=True)
class PrunedJobs(Message):
    """The jobs that are pruned, newest first."""

    jobs: tuple[PrunedJob, ...]


@message("api.stop")
@dataclass(frozen=True, slots=True)
class StopJob(Message):
    """Stop a job; answered by Ok when it has stopped."""

    job: int
