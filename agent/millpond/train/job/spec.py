# SPDX-License-Identifier: Apache-2.0
"""Pure: a training job, as its TOML file describes it. A key's meaning and bounds lie beside it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from millpond.aggregate.encoding.layout import PLAIN, Encoding
from millpond.aggregate.masking.messages import SumBits
from millpond.base.keys import MOST, Key
from millpond.privacy.spec import PrivacySpec
from millpond.train.job.encodings import encoding_of
from millpond.train.job.host_spec import EvaluationSpec, LimitsSpec, OuterSpec, TrackSpec
from millpond.train.job.variation import Variation
from millpond.train.repeats import RepeatSpec
from millpond.train.strategies.catalogue import as_table
from millpond.train.strategies.strategy import LocalRule

Named = str | dict[str, Any]
"""A name, or a table with a ``name`` and arguments."""
MOST_BUFFER = 1024
"""Updates in a buffer: the unit of its sum, and the error of its mean, grow with it."""


@dataclass(frozen=True, slots=True)
class DeviceFolder:
    """A folder of one ``device``: its ``path`` in the volume."""

    device: str
    path: str


@dataclass(frozen=True, slots=True)
class DataSpec(Variation):
    """The folders of the samples. Without a private folder, the public samples of one device are streamed to
    all other workers. The task's ``dataset`` reads the samples; without that hook they are labelled images.
    """

    private: Annotated[
        str, Key("a folder of each device; its samples never leave the device", example='"private/digits"')
    ] = ""
    test: Annotated[
        str, Key("a folder on the host; the model is scored on its samples", example='"test"')
    ] = ""
    public: Annotated[
        str | None,
        Key(
            'a folder of each device that the host reads, too; "csd0:public/x" streams one',
            example='"public/digits"',
        ),
    ] = None
    format: Annotated[
        Literal["npy", "idx", "images"], Key('how labelled images are stored; "images": a folder per class')
    ] = "npy"
    classes: Annotated[
        tuple[str, ...], Key('folders of the classes, for "images"; empty: those of the test folder')
    ] = ()

    @property
    def of_device(self) -> DeviceFolder | None:
        """The public folder of one device, None where each device has its own, or none."""
        device, colon, path = (self.public or "").partition(":")
        return DeviceFolder(device, path) if colon else None

    @property
    def is_streamed(self) -> bool:
        """Whether the public samples of one device are streamed to other workers. Those of a job with private
        data are not: what a worker asks for would tell another device of what it has seen.
        """
        return not self.private and self.of_device is not None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The user's code, in the job's table ``[task]`` or ``[model]``. In ``[task]`` the factory makes a task,
    which has hooks, see ``train.task``. In ``[model]`` it makes a model alone, which classifies images.
    """

    factory: Annotated[
        str, Key("module:callable; the callable makes the task or the model", example='"mymodel:build"')
    ]
    files: Annotated[
        tuple[str, ...],
        Key("files and folders that are sent to the devices with the job", example='["mymodel.py"]'),
    ] = ()
    initial: Annotated[str | int, Key("first values: a safetensors file or index, or a job's number")] = ""
    arguments: Annotated[dict[str, Any], Key("arguments of the factory", example="{ width = 64 }")] = field(
        default_factory=dict
    )
    signature: Annotated[
        str, Key("file that `millpond sign` writes, for devices that take signed code only")
    ] = ""
    wheels: Annotated[tuple[str, ...], Key("wheel files of packages that the code imports")] = ()


SGD_RATE = 0.05
"""The learning rate of SGD for a job that has none."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer of ``torch.optim`` by its ``name``, in any case, with its ``arguments``. Without a name
    it is that of the task, else SGD. Without a rate it has its own.
    """

    name: str = ""
    learning_rate: float | None = 1.0
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """A scheduler of ``torch.optim.lr_scheduler`` by its ``name``, stepped after each round or epoch. The
    text "total" in its ``arguments`` is their number. Without a name it is that of the task, if there is
    one.

    With ``each = "step"`` the rate changes at each synchronous step: it is that of the epochs that are done,
    with the share of this one, so that steps of any size count. FireCaffe (section 7.3) trains GoogLeNet with
    (1 - iteration / iterations)^0.5: ``PolynomialLR`` with ``total_iters = "total"``, ``power = 0.5``.
    """

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    each: Literal["epoch", "step"] = "epoch"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKeys:
    """The keys of ``[train]`` that workers get as they are. Other numbers of threads round otherwise."""

    threads: Annotated[int, Key("processor threads of a worker; 0: all", 0, 1024)] = 1
    accumulate: Annotated[
        int,
        Key(
            "most parts of a batch, to save memory; a part has whole groups of policy.least_samples", above=0
        ),
    ] = 1
    clip_norm: Annotated[
        float | None, Key("largest L2 norm of a batch's gradient", above=0, example="1.0")
    ] = None
    precision: Annotated[Literal["float32", "bfloat16"], Key('"bfloat16": computes under autocast')] = (
        "float32"
    )
    prefetch: Annotated[
        int,
        Key(
            "batches that are read ahead, in as many threads if the data set is thread_safe, else in one",
            0,
            64,
        ),
    ] = 0


@dataclass(frozen=True, slots=True)
class TrainingSpec(WorkerKeys):
    """The training of one worker. Without a ``learning_rate`` it is SGD_RATE for SGD, else the optimizer's
    own.

    With ``mini_epoch`` a worker takes that many samples at a time (fewer if the device lacks the memory) and
    trains on them in all ``epochs`` of the round, or as a rule ``repeat`` says. So it reads each sample once.
    """

    optimizer: Annotated[
        Named, Key('one of torch.optim, or { name = "AdamW", weight_decay = 0.01 }', example='"SGD"')
    ] = ""
    learning_rate: Annotated[
        float | None, Key("unset: 0.05 for SGD, else the default of the optimizer", above=0, example="0.05")
    ] = None
    momentum: Annotated[float, Key("momentum of SGD", 0, 1)] = 0.9
    scheduler: Annotated[
        Named,
        Key(
            'one of torch.optim.lr_scheduler: { name = "CosineAnnealingLR", T_max = "total" }; '
            'with each = "step" for each synchronous step'
        ),
    ] = ""
    batch: Annotated[int, Key("samples in a batch", above=0)] = 32
    epochs: Annotated[int, Key("epochs in a round", above=0)] = 1
    encoding: Annotated[
        Named, Key('encoding of updates: "float32", "bfloat16", "int8", { name = "top-k", share = 0.01 }')
    ] = "float32"
    mini_epoch: Annotated[int, Key("above 0: a round trains on so many samples at a time, in memory", 0)] = 0
    repeat: Annotated[Named, Key('"score", "bands", "bollinger": a rule repeats a mini-epoch')] = ""


@dataclass(frozen=True, slots=True)
class FederatedSpec:
    """Rounds of averaging. With 0 ``rounds`` the workers are prepared, and the job ends. ``strategy`` is a
    name, or a table with a ``name`` or a ``factory`` and further keys, see ``strategies.catalogue``.

    A ``deadline`` of "auto" follows from the median and the spread of the devices' last times.

    ``late`` updates are dropped, or carried into the round in which they come. With a ``buffer`` rounds are
    asynchronous: a round ends when the buffer has that many updates, and a device that has answered begins
    anew at once. A device that takes three times the ``deadline``, and more than a minute, is given up. With
    "carry" or a buffer, an update from a state that is ``s`` rounds old counts ``1 / sqrt(1 + s)``, and
    nothing beyond ``max_staleness``.
    """

    rounds: Annotated[int, Key("most rounds", 0)] = 20
    deadline: Annotated[
        float | Literal["auto"],
        Key(
            "seconds that a round waits; up to 8 times as long if most devices miss it; "
            '"auto": from their last times',
            above=0,
        ),
    ] = 60.0
    quorum: Annotated[float, Key("share of the devices that must answer for a round to count", 0, 1)] = 0.5
    fraction: Annotated[
        float, Key("share of the devices that a round asks; each round chooses anew", 0, 1)
    ] = 1.0
    least: Annotated[int, Key("fewest devices that a round asks")] = 2
    strategy: Annotated[
        Named,
        Key('a name, { name = "fedprox", mu = 0.1 }, or a class of your own: { factory = "task:Sign" }'),
    ] = "fedavg"
    local: Annotated[
        tuple[str, ...], Key('patterns of parameters and buffers that stay on each device: "head.*"')
    ] = ()
    late: Annotated[
        Literal["drop", "carry"],
        Key('updates after the deadline; "carry": an update counts in the round in which it comes'),
    ] = "drop"
    buffer: Annotated[int, Key("above 0: asynchronous rounds, each of this many updates", 0, MOST_BUFFER)] = 0
    secure: Annotated[
        Literal["", "cohort"],
        Key('"cohort": updates leave their devices masked, and the host learns their sum; needs limits.clip'),
    ] = ""
    sum_bits: Annotated[
        SumBits,
        Key(
            "bits of the whole numbers to which clipped updates are rounded and added; 32: a masked update "
            "has as many bytes as one without masks, and values are rounded to 2e-9 of the largest sum; "
            '"auto": 32 if no noise is added and no value of a mean is off by more than 3e-8, else 64'
        ),
    ] = "auto"
    max_staleness: Annotated[
        int | None,
        Key(
            "most rounds that the state of a late update may be old; unset: any number",
            0,
            1 << 16,
            example="10",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class SynchronousSpec:
    """Synchronous steps instead of rounds: ``epochs`` over all samples. With 0 epochs, the workers are
    measured and nothing is trained.

    Late sums count in a later step. A step has fewer samples than ``global_batch`` if a worker's own samples
    would not last through the epoch. With ``local_steps`` above 1, workers average differences instead of
    gradients (local SGD, Stich 2019), or combine them as ``strategy`` says.
    """

    epochs: Annotated[int, Key("epochs over all samples", 0)] = 10
    policy: Annotated[
        Literal["balance", "stannis", "stannis-inverse", "stannis-cpu", "fixed"],
        Key(
            'how batches are chosen; "fixed": by the first plan; "stannis": '
            "by equations 2 and 3 of the paper, "
            '"stannis-inverse" and "stannis-cpu": by its first and third method'
        ),
    ] = "balance"
    patience: Annotated[float, Key("a step waits this many times its planned time; 0: for all workers")] = 1.1
    global_batch: Annotated[
        int | None,
        Key("samples in a step; unset: as many as the workers do best with", 2, 1 << 20, example="256"),
    ] = None
    steps: Annotated[int, Key("fewest steps in an epoch", 1)] = 32
    scaling: Annotated[
        Literal["linear", "sqrt", "none"],
        Key("how the learning rate follows the samples of a step, from those of [train] batch"),
    ] = "none"
    warmup: Annotated[int, Key("steps until the scaled learning rate is reached", 0)] = 0
    checkpoint: Annotated[float, Key("seconds between two checkpoints", 0.1)] = 10.0
    host: Annotated[bool, Key("whether the host computes, too, if there is public data")] = True
    quorum: Annotated[
        float, Key("share of the devices that must take part; below it the job waits", 0, 1)
    ] = 0.5
    local_steps: Annotated[
        int,
        Key("local steps between two exchanges; above 1: differences are exchanged (local SGD)", 1, 1 << 16),
    ] = 1
    strategy: Annotated[Named, Key("as in [federated]; for local_steps above 1")] = "fedavg"


@dataclass(frozen=True, slots=True)
class WorkSpec(WorkerKeys):
    """The part of a job that its workers need. With ``passes`` a worker trains so many times over the samples
    of an exchange, in batches of ``batch`` or (if that is 0) in ``steps`` equal batches, and answers with its
    difference; without, it answers with the sum of the gradients.

    ``local`` is what a strategy adds to local training. Tensors of the model whose names match
    ``local_layers`` stay with each worker.

    ``model`` is a task if ``task``, else a model alone. The job has ``total`` rounds or epochs. A share
    ``held_out`` of each private folder is not trained on. Where updates are ``secure`` devices mask them,
    with ``privacy`` they add noise, and scale larger ones down to the norm ``clip`` per sample.
    """

    name: str
    model: ModelSpec
    task: bool = False
    format: Literal["npy", "idx", "images"] = "npy"
    classes: tuple[str, ...] = ()
    variation: Variation = field(default_factory=Variation)
    seed: int = 0
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    scheduler: SchedulerSpec = field(default_factory=SchedulerSpec)
    total: Annotated[int, Key(least=0)] = 1
    passes: Annotated[int, Key(least=0)] = 0
    batch: Annotated[int, Key(least=0)] = 0
    steps: Annotated[int, Key(above=0)] = 1
    held_out: Annotated[float, Key(least=0, most=1)] = 0.0
    encoding: Encoding = field(default_factory=Encoding)
    local: LocalRule = field(default_factory=LocalRule)
    local_layers: tuple[str, ...] = ()
    mini_epoch: Annotated[int, Key(least=0)] = 0
    repeat: RepeatSpec = field(default_factory=RepeatSpec)
    secure: Literal["", "cohort"] = ""
    clip: Annotated[float, Key(least=0)] = 0.0
    privacy: PrivacySpec | None = None

    def most_local_steps(self, samples: int) -> int:
        """Return the most local steps over so many samples: a batch is half full at least, or one group."""
        if not self.batch:
            return self.passes * self.steps
        if self.mini_epoch:  # of a size that the device may choose
            return self.passes * samples
        return self.passes * min(samples, 2 * samples // self.batch + 1)


@dataclass(frozen=True, slots=True)
class Job:
    """A training job. With a table ``[synchronous]`` it is synchronous, else federated; it never has both
    tables. It has a ``[task]``, or a ``[model]`` alone.

    With ``aggregate = "auto"`` the devices add if they have a LAN of their own and if that is faster. With
    ``topology = "auto"`` it is the topology that takes the least time by the rates of the links. "udp" is a
    star whose nodes exchange datagrams on their LAN. With ``repair = false`` lost ones are not sent again:
    each part of the mean is over the devices whose part has come, and a device keeps its own values where no
    part of the mean comes.
    """

    name: Annotated[str, Key("the job's name; files and memory are named after it", example='"mine"')]
    data: DataSpec
    model: Annotated[ModelSpec | None, Key("or [task], with the same keys")] = None
    task: ModelSpec | None = None
    seed: Annotated[int, Key("seed of the first values, the order of samples, and random draws")] = 0
    train: TrainingSpec = field(default_factory=TrainingSpec)
    federated: FederatedSpec | None = None
    synchronous: SynchronousSpec | None = None
    privacy: PrivacySpec | None = None
    outer: OuterSpec | None = None
    evaluate: EvaluationSpec = field(default_factory=EvaluationSpec)
    limits: LimitsSpec = field(default_factory=LimitsSpec)
    track: TrackSpec = field(default_factory=TrackSpec)
    devices: Annotated[tuple[str, ...], Key("names of devices; empty: the whole fleet")] = ()
    priority: Annotated[
        int, Key("of the queued jobs, the one with the highest priority begins first", -MOST)
    ] = 0
    aggregate: Annotated[
        str, Key('where updates are added: "host", or a device, such as "csd2", as the root of the devices')
    ] = "auto"
    topology: Annotated[Literal["auto", "star", "tree", "ring", "udp"], Key("how the devices add")] = "auto"
    repair: Annotated[bool, Key('topology = "udp": lost datagrams are sent again')] = True

    @property
    def code(self) -> ModelSpec:
        """The user's code: of the task, or of the model alone."""
        found = self.task or self.model
        assert found is not None  # see ``check``
        return found

    @property
    def table(self) -> Literal["task", "model"]:
        """The table of the user's code."""
        return "task" if self.task else "model"

    @property
    def adds_on_host(self) -> str:
        """The key for whose sake the host adds the updates, "" if devices can."""
        if self.limits.clip is not None and not self.averaging.secure:  # else devices clip
            return "limits.clip"
        if self.outer:
            return "outer"
        if self.averaging.buffer:
            return "federated.buffer"
        return "train.encoding" if self.work.encoding.name != PLAIN else ""

    @property
    def sum_bits(self) -> SumBits:
        """The bits of the sums of clipped updates."""
        return 64 if self.synchronous else self.averaging.sum_bits

    @property
    def averaging(self) -> FederatedSpec:
        """The table of a federated job, all of it defaults if the file has none."""
        return self.federated or FederatedSpec()

    @property
    def scoring(self) -> EvaluationSpec:
        """When and where the model is scored, by rounds of the fleet also where the job is resident."""
        return replace(self.evaluate, every=self.evaluate.every * (self.outer.every if self.outer else 1))

    @property
    def quorum(self) -> float:
        """The share of the devices without which the job does not go on."""
        return self.synchronous.quorum if self.synchronous else self.averaging.quorum

    @property
    def total(self) -> int:
        """The number of its rounds or epochs."""
        return self.synchronous.epochs if self.synchronous else self.averaging.rounds

    @property
    def exchanges_differences(self) -> bool:
        """Whether workers answer with differences after local training, rather than with gradients."""
        return self.synchronous is None or self.synchronous.local_steps > 1

    @property
    def work(self) -> WorkSpec:
        """The part that workers need."""
        train, synchronous = self.train, self.synchronous
        local: dict[str, Any] = {}
        if self.exchanges_differences:
            local = {"mini_epoch": train.mini_epoch, "repeat": RepeatSpec(*_named(train.repeat))}
            local["passes"] = train.epochs if train.mini_epoch or not synchronous else 1
            local |= {"steps": synchronous.local_steps} if synchronous else {"batch": train.batch}
        return WorkSpec(
            self.name,
            self.code,
            self.task is not None,
            self.data.format,
            self.data.classes,
            Variation(resize=self.data.resize, crop=self.data.crop, flip=self.data.flip),
            self.seed,
            _optimizer(train.optimizer, train.learning_rate, train.momentum),
            scheduler_of(train.scheduler),
            self.total,
            held_out=self.evaluate.held_out if "devices" in self.evaluate.on else 0.0,
            encoding=encoding_of(train.encoding, "the job"),
            local_layers=() if synchronous else self.averaging.local,
            secure="" if synchronous else self.averaging.secure,
            clip=(self.limits.clip or 0.0) if self.averaging.secure or self.privacy else 0.0,
            privacy=self.privacy,
            **local,
            **{key.name: getattr(train, key.name) for key in fields(WorkerKeys)},
        )

    @property
    def strategy(self) -> dict[str, Any]:
        """The table of the strategy, of no meaning for a job that exchanges gradients."""
        return as_table((self.synchronous or self.averaging).strategy)


def _named(given: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a table, or of a name alone."""
    table = {"name": given} if isinstance(given, str) else dict(given)
    return str(table.pop("name", "")), table


def scheduler_of(given: str | dict[str, Any]) -> SchedulerSpec:
    """Return the scheduler of a table, or of a name alone."""
    name, arguments = _named(given)
    return SchedulerSpec(name, arguments, arguments.pop("each", "epoch"))


def _optimizer(given: str | dict[str, Any], rate: float | None, momentum: float) -> OptimizerSpec:
    name, arguments = _named(given)
    if name.lower() in ("", "sgd"):
        return OptimizerSpec(name, SGD_RATE if rate is None else rate, {"momentum": momentum, **arguments})
    return OptimizerSpec(name, rate, arguments)
