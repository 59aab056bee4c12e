# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages between commands and the host daemon, over the daemon's Unix socket."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.host.model.jobs import Round
from millpond.train.balance.profile import Profile
from millpond.train.job.files import JobFile
from millpond.train.job.spec import Job
from millpond.train.protocol import BatchPart
from millpond.tunnel.datapath.stats import PacketStats
from millpond.wire.control_messages import Ledger, Load, LogPosition, Welcome
from millpond.wire.messages import Message, message

ENDED = "the host daemon has ended; jobs go on when it is back"
"""What a command says that has lost the daemon."""


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
    """All devices of the fleet."""

    devices: tuple[DeviceInfo, ...]


@message("api.tunnel.get")
@dataclass(frozen=True, slots=True)
class GetTunnel(Message):
    """Ask for the TunnelInfo of a device."""

    device: str


@message("api.tunnel")
@dataclass(frozen=True, slots=True)
class TunnelInfo(Message):
    """The host's endpoint of a device's tunnel now; ``state`` is up or down, ``reason`` says why it is down.

    ``to_device`` and ``from_device`` count since the endpoint was started, at ``time`` (s, of a steady
    clock). The other figures are of the present link of the tunnel, or the last.
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
    resets: int
    to_device: PacketStats
    from_device: PacketStats


@message("api.dial")
@dataclass(frozen=True, slots=True)
class Dial(Message):
    """Ask for a TCP connection to a device's port: answered by Ok, then the socket's descriptor."""

    device: str
    port: int


@message("api.volume")
@dataclass(frozen=True, slots=True)
class GetVolume(Message):
    """Ask for a connection to a device's volume: answered by VolumeTicket, then the socket's descriptor."""

    device: str


@message("api.volume.connection")
@dataclass(frozen=True, slots=True)
class VolumeTicket(Message):
    """A ticket: the connection that follows must attach with ``token``, in TLS if ``tls``."""

    token: bytes
    tls: bool


@message("api.ledgers.get")
@dataclass(frozen=True, slots=True)
class GetLedgers(Message):
    """Ask for Ledgers."""


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


@message("api.submit")
@dataclass(frozen=True, slots=True)
class Submit(Message):
    """Queue a job with ``files`` by name, whose contents the daemon has; answered by Submitted."""

    job: Job
    files: dict[str, JobFile]


@message("api.submitted")
@dataclass(frozen=True, slots=True)
class Submitted(Message):
    """The job's number."""

    id: int


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job now: ``round`` is its last finished one, of ``rounds``; ``unit`` is what it calls a round, times
    are Unix seconds. ``metric`` decides which model is the best: ``score`` is its last value, ``best`` that
    of ``best_round``, None before the first. ``reason`` says what a queued job waits for.
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


@message("api.jobs.get")
@dataclass(frozen=True, slots=True)
class GetJobs(Message):
    """Ask for JobList."""


@message("api.jobs")
@dataclass(frozen=True, slots=True)
class JobList(Message):
    """All jobs, oldest first."""

    jobs: tuple[JobInfo, ...]


@message("api.job.get")
@dataclass(frozen=True, slots=True)
class GetJob(Message):
    """Ask for the JobRecord of a job."""

    job: int


@message("api.job")
@dataclass(frozen=True, slots=True)
class JobRecord(Message):
    """A job as it was submitted, ``code`` as the digest of its files, and its finished rounds."""

    info: JobInfo
    job: Job
    code: str
    rounds: tuple[Round, ...]


@message("api.watch")
@dataclass(frozen=True, slots=True)
class Watch(Message):
    """Follow a job from its first round: answered by JobProgress repeatedly, the last with an ended job."""

    job: int


@message("api.progress")
@dataclass(frozen=True, slots=True)
class JobProgress(Message):
    """The job now, and the rounds and log lines that are new since the last JobProgress."""

    info: JobInfo
    rounds: tuple[Round, ...] = ()
    lines: tuple[str, ...] = field(default_factory=tuple)


@message("api.log.get")
@dataclass(frozen=True, slots=True)
class GetLogOf(Message):
    """Ask for the last lines of the log of a device (by name) or a job (by number); answered by Log."""

    target: str
    lines: int


@message("api.log.new.get")
@dataclass(frozen=True, slots=True)
class GetNewLogOf(Message):
    """Ask for the lines of a log behind ``after``, or without it the last lines; answered by NewLog."""

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


@message("api.resume")
@dataclass(frozen=True, slots=True)
class ResumeJob(Message):
    """Resume an ended job, up to ``rounds`` rounds or epochs if given; answered by Ok when it is queued."""

    job: int
    rounds: int | None = None


@message("api.stop")
@dataclass(frozen=True, slots=True)
class StopJob(Message):
    """Stop a job; answered by Ok when it has stopped."""

    job: int


@message("api.topology.get")
@dataclass(frozen=True, slots=True)
class GetTopology(Message):
    """Ask for the TopologyInfo of vectors of ``size`` values that all ready devices add, with the device
    ``root`` first ("": any). Reductions are run ``repeats`` times.
    """

    size: int
    root: str = ""
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """The bytes per second and seconds of a hop of a device's link to other devices, and to the host."""

    rate: float
    latency: float
    uplink_rate: float
    uplink_latency: float


@dataclass(frozen=True, slots=True)
class ReductionInfo:
    """The seconds of a reduction and of the way back: predicted, and measured (median; none without
    repeats).
    """

    name: str
    predicted: float
    measured: float | None = None


@message("api.topology")
@dataclass(frozen=True, slots=True)
class TopologyInfo(Message):
    """The measured links by device, whether they are a LAN of the devices' own, the rate that they ``share``
    (None: no limit seen), and the reductions, the fastest by prediction first.
    """

    links: dict[str, LinkInfo]
    lan: bool
    shared: float | None
    reductions: tuple[ReductionInfo, ...]
