# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages between a coordinator and a worker, on the host or (relayed by its agent) a device.

An exchange is Work, answered by Update, with WorkProgress before it where that lasts. Its values are then
fetched in parts. Between a worker process and its parent (the agent or the host daemon) the state and the
values lie in shared memory, float32 [size] each; between an agent and the host they follow their messages.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from millpond.aggregate.encoding.layout import PLAIN
from millpond.aggregate.masking.messages import NO_CERTIFICATE, KeyCertificate
from millpond.aggregate.messages import Advance
from millpond.train.balance.ranges import Ranges
from millpond.train.job.files import JobFile
from millpond.train.job.spec import WorkSpec
from millpond.train.state.layout import Tensor
from millpond.train.strategies.strategy import Combination, LocalRule
from millpond.wire.messages import Kind, Message, message

PART_VALUES: Final = 1 << 17
"""The most values of one part of an update."""
SPREAD: Final = "spread"
"""The code of a refusal: the state has to be sent again."""
MOST_PERCENT: Final = 99
"""The most that WorkProgress tells: the answer tells the end."""
OWN_STATE: Final = "own"
"""Stands for the digest of a state where each device goes on from its own."""


def state_digest(state: memoryview) -> str:
    """Return the digest of a state that is spread."""
    return hashlib.sha256(state).hexdigest()


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of samples: ``path`` is relative to the volume on a device, absolute on the host. The samples
    are those of device ``source``, ``public`` or private ones. ``streamed`` ones are on another device, where
    ``path`` is relative to the volume, too. The agent tells its worker to take them in groups of ``group``,
    see ``data_plan.order``.
    """

    path: str
    source: str
    public: bool = False
    group: int = 1
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class DataServicePlace:
    """The ``address`` and ``port`` of a device's data service, and the ``secret`` of those that it serves."""

    address: str
    port: int
    secret: str = field(repr=False)


@message("warm-up")
@dataclass(frozen=True, slots=True)
class WarmUp(Message):
    """Load what workers need, because one will soon be prepared; answered by Ok at once."""


FIRST_VALUES = "first-values.safetensors"


@message("prepare")
@dataclass(frozen=True, slots=True)
class PrepareWorker(Message):
    """Build the model, whose state must be of ``tensors`` and the rest of which (frozen parameters, first
    values of local layers) must have the checksum ``frozen``, and load the samples of ``folders``; answered
    by Ready, and by an agent by MissingFiles before. An agent needs ``files``, the job's by name, and
    ``signature``, one of them all by an owner of the device. A worker on the host computes with
    ``accelerator``, and has ``states`` states in its shared memory. Personal state is that of the ``run``: of
    this job, also when it resumes. Mini-epochs take ``fast`` bytes of memory at most; an agent puts its own
    number there. ``first`` is the file of these frozen and first values, whose names are ``unsent``, for a
    processor that rounds random ones otherwise than the host's: it is laid out as FIRST_VALUES, and refused
    where a value differs by more. Samples of a streamed folder come from
    ``streams``, to which the agent connects its worker.
    """

    work: WorkSpec
    worker: str
    folders: tuple[Folder, ...]
    files: dict[str, JobFile]
    tensors: tuple[Tensor, ...]
    frozen: int = 0
    tls: bool = False
    states: int = 1
    signature: str = ""
    accelerator: Literal["auto", "cpu", "cuda"] = "cpu"
    run: str = ""
    fast: int = 1 << 30
    streams: DataServicePlace | None = None
    first: JobFile | None = None
    unsent: tuple[str, ...] = ()

    @property
    def needed(self) -> dict[str, JobFile]:
        """All files that the worker finds, by name."""
        return {**self.files, FIRST_VALUES: self.first} if self.first else self.files


@message("files.missing")
@dataclass(frozen=True, slots=True)
class MissingFiles(Message):
    """The digests of the contents that are not here; each is to be sent, in this order, as FileContents."""

    digests: tuple[str, ...]


@message("file")
@dataclass(frozen=True, slots=True)
class FileContents(Message):
    """Payload: the contents of a file, whose SHA-256 is given in hexadecimal digits; answered by Ok."""

    sha256: str


@dataclass(frozen=True, slots=True)
class BatchPart:
    """A part of a batch: its ``place`` in the tree, such as "[0].mask", its type, and the lengths of a tensor
    behind the first, which is that of the samples: -1 for one that is not told, None for what is no tensor.
    """

    place: str
    type: str
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        lengths = ["" if self.shape is None else " N", *(self.shape or ())]
        return self.type + "x".join("*" if length == -1 else str(length) for length in lengths)


@message("ready", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The worker can train; ``parts`` are the numbers of samples by folder, ``held`` those that are held out
    besides. From an agent only: an answer covers whole groups of ``group`` private samples; ``token``
    entitles to the bulk connection for Work, encrypted if ``tls``. A job without rounds also has the parts of
    a ``batch`` of the first folder, as far as they may leave, one with masks the device's lasting
    ``cohort_key`` with its ``cohort_certificate``, whether it has its cohort ``pinned``, by the ``roster``
    with that number if its owners have signed one, and the ``least_devices`` of a sum.
    """

    parts: tuple[int, ...]
    held: tuple[int, ...] = ()
    group: int = 1
    token: bytes = b""
    tls: bool = False
    batch: tuple[BatchPart, ...] = ()
    cohort_key: bytes = b""
    cohort_certificate: KeyCertificate = NO_CERTIFICATE
    pinned: bool = False
    roster: int = 0
    least_devices: int = 0

    @property
    def samples(self) -> int:
        """The number of all samples."""
        return sum(self.parts)


@message("work", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Work(Message):
    """Train from the payload, the flat float32 state; answered by Update.

    ``ranges`` are positions in the order of each folder's samples in ``epoch``, see ``data_plan.order``: the
    worker itself computes the samples that lie there. With ``synthetic`` it makes so many up instead; with
    ``held_out`` it scores the state on the samples that are held out, and the update has no values.
    ``seed`` is for the order in local training and for the model's random draws, unless the agent has set
    ``draws`` for these; ``state`` is the number of the state in shared memory. With ``spread``, its digest,
    or OWN_STATE for whatever state is there, the state has come to an agent over the reduction nodes, and
    there is no payload. ``coming`` are the
    ranges of the exchanges after this one, if batches stay as they are: streamed samples are fetched ahead.
    If the host ``records`` the exchange, it may resume behind it: what the device keeps for itself is on its
    flash before the update is told. ``recorded`` is the last one before it that the host has, None for the
    one before.
    """

    exchange: int
    seed: int
    epoch: int
    ranges: tuple[Ranges, ...]
    synthetic: int = 0
    held_out: bool = False
    state: int = 0
    draws: int = 0
    spread: str = ""
    coming: tuple[tuple[Ranges, ...], ...] = ()
    recorded: int | None = None
    records: bool = True

    @property
    def samples(self) -> int:
        """The number of samples of the exchange."""
        return self.synthetic or sum(stop - start for folder in self.ranges for start, stop in folder)


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """The choice for a stream of samples: ``chunk`` samples at once, ``window`` bytes on the way; and
    what was measured for that: bytes per second, seconds of a round trip, seconds of training of a sample.
    ``idle`` is the percentage of its time that the worker is predicted to wait.
    """

    chunk: int
    window: int
    bandwidth: float
    latency: float
    step: float
    idle: int

    def rounded(self) -> StreamTiming:
        """Return it as it may leave, see ``DataTiming``."""
        return StreamTiming(
            _whole(self.chunk),
            _whole(self.window),
            _two_digits(self.bandwidth),
            _two_digits(self.latency),
            _two_digits(self.step),
            _percent(self.idle),
        )


@dataclass(frozen=True, slots=True)
class DataTiming:
    """The cost of the data of an exchange. ``waited`` is the percentage of the worker's seconds in which the
    training thread was blocked for its next batch or mini-epoch, ``stalled`` that for mini-epochs alone.
    ``reading`` are the seconds in which ``samples`` samples, of ``size`` bytes together, were read from where
    they lie, in all threads together; ``batches`` the parts of batches that were trained on. There were
    ``mini_epochs`` of them, and ``[tier] fast`` holds two of ``fitting`` samples. Where a rule repeats them,
    they were repeated ``repeats`` times together.

    They leave a device ``rounded`` to whole percentages and two decimal digits: enough to judge a data set's
    speed, and a malicious model can hide little in them.
    """

    waited: int = 0
    stalled: int = 0
    reading: float = 0.0
    samples: int = 0
    size: int = 0
    batches: int = 0
    mini_epochs: int = 0
    fitting: int = 0
    stream: StreamTiming | None = None
    repeats: int = 0

    def rounded(self) -> DataTiming:
        """Return it as it may leave: what is out of range is moved into it."""
        return DataTiming(
            _percent(self.waited),
            min(_percent(self.stalled), _percent(self.waited)),
            _two_digits(self.reading),
            _whole(self.samples),
            _whole(self.size),
            _whole(self.batches),
            _whole(self.mini_epochs),
            _whole(self.fitting),
            self.stream.rounded() if self.stream else None,
            _whole(self.repeats),
        )

    @property
    def fault(self) -> str:
        """The reason for which a coordinator refuses it, "" if there is none."""
        stream, found = self.stream, [self.reading, self.samples, self.size, self.batches]
        found += [self.mini_epochs, self.fitting, self.repeats]
        if stream:
            found += [stream.chunk, stream.window, stream.bandwidth, stream.latency, stream.step]
        if not 0 <= self.stalled <= self.waited <= 100 or (stream and not 0 <= stream.idle <= 100):
            return "it waited for data for no share of its time"
        if not all(0 <= value <= _LARGEST for value in found):
            return "its figures of reading are not finite, or out of range"
        return ""


_LARGEST, _SMALLEST = 1e15, 1e-6  # of a figure of reading


def _percent(value: int) -> int:
    return min(max(value, 0), 100)


def _two_digits(value: float) -> float:
    return float(f"{min(value, _LARGEST):.1e}") if value >= _SMALLEST and not math.isnan(value) else 0.0


def _whole(value: int) -> int:
    return int(_two_digits(value))


@message("update", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class Update(Message):
    """The head of an update. Its values are flat float32 in the state's layout: of each parameter the sum of
    its gradients over ``samples`` samples, or the difference that local training made times ``weight``; of
    each buffer (running statistics) its change times ``weight``. The weight of gradients is the count of the
    loss, such as tokens, that of differences the number of samples.

    No value of a parameter exceeds ``largest``, and ``norm`` is their L2 norm, as they are decoded: an agent
    encodes them as ``encoding`` says, a process on the host does not. No value of a buffer, which is never
    encoded, exceeds ``shift``. ``metrics`` are sums and counts over the samples: the loss, or all metrics of
    samples that are held out. ``unused`` are the numbers of trained parameters without a gradient: an
    optimizer leaves them as they are. ``local_steps`` is the number by which a normalized difference was
    divided, see ``strategies.fednova``. ``busy`` is the part of the processor that other work took meanwhile,
    0 to 1, NaN if it is not known, ``peak`` the worker's high-water mark of memory, in bytes. ``data`` is
    what the reading of the samples that were trained on took, of the ``seconds`` of the whole local
    computation.
    """

    exchange: int
    samples: int
    weight: float
    largest: float
    norm: float
    seconds: float
    busy: float
    peak: int
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    encoding: str = PLAIN
    local_steps: float = 1.0
    data: DataTiming = field(default_factory=DataTiming)
    shift: float = 0.0
    unused: tuple[int, ...] = ()


@message("work.progress", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class WorkProgress(Message):
    """The ``percent`` of the samples of a Work that are computed, 1 to 99; comes before its answer, any
    number of times, each greater than the one before.
    """

    percent: int


@message("fetch")
@dataclass(frozen=True, slots=True)
class Fetch(Message):
    """Ask for the first ``stop`` values of the last update; answered by Parts, in order."""

    stop: int


@message("part", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Part(Message):
    """Payload: values of an update from ``start`` on, at most PART_VALUES, in its encoding."""

    start: int


# The messages below are between the host daemon and its parameter server, a process of its own.


@message("server.prepare")
@dataclass(frozen=True, slots=True)
class PrepareServer(Message):
    """Build the model and its optimizer, that of ``work`` for gradients and that of the ``strategy`` for
    differences, and try the model on samples of the folder ``test``, if there is one; answered by
    ServerReady. ``states`` is the number of states in the shared memory. If ``streamed``, samples come to
    the workers as streams.
    """

    work: WorkSpec
    strategy: dict[str, Any] = field(default_factory=dict)
    states: int = 1
    test: str = ""
    accelerator: Literal["auto", "cpu", "cuda"] = "cpu"
    streamed: bool = False


@message("server.ready", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class ServerReady(Message):
    """The model's state is of ``tensors``, and the first state in shared memory is the seeded one.
    ``frozen`` are its tensors that are not exchanged, frozen parameters and local layers, with a
    ``checksum``; ``note`` is a line about its first values, or
    "". ``local`` and ``combine`` are what the strategy declares. ``step`` makes each state of the last
    one, if it follows from the mean alone; if ``stateless`` no process keeps anything else between exchanges.
    """

    tensors: tuple[Tensor, ...]
    frozen: tuple[Tensor, ...] = ()
    checksum: int = 0
    note: str = ""
    local: LocalRule = field(default_factory=LocalRule)
    combine: Combination = field(default_factory=Combination)
    step: Advance | None = None
    stateless: bool = False


@message("evaluate")
@dataclass(frozen=True, slots=True)
class Evaluate(Message):
    """Score the state on the samples of ``folder``, if there is one, and summarize the sums and counts of the
    ``devices``; answered by Score.
    """

    folder: str = ""
    devices: dict[str, tuple[float, float]] = field(default_factory=dict)


@message("score", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class Score(Message):
    """The task's figures on the samples of the ``host``, and on those of the ``devices``."""

    host: dict[str, float]
    devices: dict[str, float] = field(default_factory=dict)


@message("apply")
@dataclass(frozen=True, slots=True)
class Apply(Message):
    """Ask the parameter server for one step of the optimizer, at ``factor`` times its learning rate of round
    or epoch ``epoch``, of which a ``share`` is done, with the mean in shared memory; ``unused`` parameters
    have no gradient. The new state is the one with number ``state``; if that is another than the last, the
    last stays as it is. Answered by StepApplied.
    """

    factor: float
    epoch: int = 1
    state: int = 0
    unused: tuple[int, ...] = ()
    share: float = 0.0


@message("applied")
@dataclass(frozen=True, slots=True)
class StepApplied(Message):
    """The new state is in shared memory; the step took the optimizer ``seconds``."""

    seconds: float


@message("momentum.get")
@dataclass(frozen=True, slots=True)
class GetMomentum(Message):
    """Ask the parameter server for the tensors of its optimizer; answered by Momentum."""


@message("momentum", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Momentum(Message):
    """Payload: the optimizer's tensors, flat float32 [size] in the order of ``tensors``."""

    tensors: tuple[Tensor, ...]
    size: int


@message("model.get")
@dataclass(frozen=True, slots=True)
class GetModel(Message):
    """Ask the parameter server for the whole model as it is to be used; answered by Model."""


@message("model", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Model(Message):
    """Payload: flat float32 [size] in the order of ``tensors``, those that are not exchanged last."""

    tensors: tuple[Tensor, ...]
    size: int


@message("restore", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Restore(Message):
    """Have the parameter server take the state in shared memory, and as payload that follows the message an
    optimizer's tensors as Momentum had them, none before the first step. Answered by Ok.
    """

    tensors: tuple[Tensor, ...]
