# SPDX-License-Identifier: Apache-2.0
"""Pure: a training job, as its TOML file describes it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from millpond.aggregate.encoding.layout import Encoding
from millpond.base.errors import ConfigError
from millpond.base.schema import load
from millpond.train.strategies.catalogue import as_table
from millpond.train.strategies.strategy import LocalRule


@dataclass(frozen=True, slots=True)
class DeviceFolder:
    """A folder of one ``device``: its ``path`` in the volume."""

    device: str
    path: str


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The folders of the samples: ``private`` and ``public`` ones of every volume, ``test`` one of the host.
    A public folder of one device alone is written "csd0:public/digits". Without a private folder its samples
    are streamed to all other workers.

    A task of one's own reads them with its ``dataset``. Without one they hold labelled images in ``format``;
    ``classes`` (format ``images``) names the sub-folders by label, and is read from the test folder if left
    out.
    """

    private: str = ""
    test: str = ""
    public: str | None = None
    format: Literal["npy", "idx", "images"] = "npy"
    classes: tuple[str, ...] = ()

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
    """The user's code, in the job's table ``[task]`` or ``[model]``: ``factory`` is ``module:callable``,
    called with ``arguments``. A task has hooks, see ``train.task``; for ``[model]`` it makes a model alone,
    which classifies images. ``files`` are its code and all else that it reads, files and folders; ``wheels``
    are packages that it imports; ``signature`` is the file of a signature of them by an owner of devices.
    ``initial`` is a file of the model's first values, in safetensors, or the number of a job of the same
    fleet, whose model is taken when the job is submitted.
    """

    factory: str
    files: tuple[str, ...] = ()
    initial: str | int = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    signature: str = ""
    wheels: tuple[str, ...] = ()


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
    """

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """The training of one worker: the optimizer, ``epochs`` over its samples in one round in batches of
    ``batch``, with ``threads`` of its processor (0: all). Other numbers of threads round otherwise.

    ``optimizer`` and ``scheduler`` are names in torch, or tables with a name and arguments. ``momentum`` is
    for SGD. Without a ``learning_rate`` it is SGD_RATE for SGD, else the optimizer's own. A batch is
    computed in ``accumulate`` parts, which need less memory. Gradients are scaled down to the L2 norm
    ``clip_norm``. ``precision`` "bfloat16" is autocast. The next ``prefetch`` batches are read meanwhile, in
    as many threads where the data set is ``thread_safe``, else in one. Devices send their updates in
    ``encoding``: "float32", "bfloat16", "int8", "top-k", or a table with this ``name`` and the ``share``
    (0..1) of the values that top-k sends.

    With ``mini_epoch`` a round's ``epochs`` are over so many samples at a time, which are in memory
    meanwhile, fewer where the device has no memory for them; so each round reads each sample once.
    """

    optimizer: str | dict[str, Any] = ""
    learning_rate: float | None = None
    momentum: float = 0.9
    scheduler: str | dict[str, Any] = ""
    batch: int = 32
    epochs: int = 1
    threads: int = 1
    accumulate: int = 1
    clip_norm: float | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    prefetch: int = 0
    encoding: str | dict[str, Any] = "float32"
    mini_epoch: int = 0


@dataclass(frozen=True, slots=True)
class EvaluationSpec:
    """The scoring of the model after ``every`` rounds or epochs, and after the last: ``on`` the host with its
    test samples, on the devices with a share ``held_out`` of each private folder, which is not trained on.
    Of a device only sums and counts leave.

    ``metric`` on the first of ``on`` decides which model is the best, "accuracy" or else "loss" if left out;
    ``mode`` says whether a large or a small value is good, and is "min" for a loss alone if left out. The job
    ends when the metric has reached ``target``, and after ``patience`` evaluations without a better one.
    """

    every: int = 1
    on: tuple[Literal["host", "devices"], ...] = ("host",)
    held_out: float = 0.1
    metric: str = ""
    mode: Literal["", "max", "min"] = ""
    target: float | None = None
    patience: int | None = None


@dataclass(frozen=True, slots=True)
class FederatedSpec:
    """At most ``rounds`` rounds of averaging; with 0 the workers are prepared, and the job ends.

    Each round asks ``fraction`` of the devices (a share, 0..1), but at least ``least`` of them, chosen anew.
    It ends when all have answered or ``deadline`` seconds have passed ("auto": by the seconds of the devices'
    last answers), and counts if ``quorum`` of the devices that were asked (a share, 0..1) answered.
    ``strategy`` is the name of one, or a table with it or a ``factory`` and further keys, see
    ``strategies.catalogue``. Parameters and buffers whose names match a pattern of ``local`` stay on their
    devices.

    ``late`` updates are dropped, or carried into the round in which they come. With a ``buffer`` rounds are
    asynchronous: one ends when the buffer has so many updates, a device that has answered begins anew at
    once, and one that takes three times the ``deadline``, and more than a minute, is given up. An update from
    a state that is ``s`` rounds old counts ``1 / sqrt(1 + s)``, and not at all beyond ``max_staleness``.
    """

    rounds: int = 20
    deadline: float | Literal["auto"] = 60.0
    quorum: float = 0.5
    fraction: float = 1.0
    least: int = 2
    strategy: str | dict[str, Any] = "fedavg"
    local: tuple[str, ...] = ()
    late: Literal["drop", "carry"] = "drop"
    buffer: int = 0
    max_staleness: int | None = None


@dataclass(frozen=True, slots=True)
class SynchronousSpec:
    """Synchronous steps instead of rounds: ``epochs`` over all samples.

    A step waits ``patience`` times as long as planned (0: for all workers), and late sums count in a later
    one. ``global_batch`` are the samples of a step, fewer where a worker's own would not last through the
    epoch; without it there are as many as the workers do best with, but an epoch has at least ``steps``. The
    learning rate of ``train`` is for ``train.batch`` samples; it follows the step's by ``scaling``, after
    ``warmup`` steps. A checkpoint is written each ``checkpoint`` seconds. ``host`` says whether the host
    computes, too. The job waits while fewer than ``quorum`` of the devices (a share, 0..1) take part.

    With ``local_steps`` above 1, workers take so many local steps over their samples of an exchange, and
    differences are averaged instead of gradients (local SGD, Stich 2019), or what ``strategy`` says.
    """

    epochs: int = 10
    policy: Literal["balance", "stannis", "fixed"] = "balance"
    patience: float = 1.1
    global_batch: int | None = None
    steps: int = 32
    scaling: Literal["linear", "sqrt", "none"] = "none"
    warmup: int = 0
    checkpoint: float = 10.0
    host: bool = True
    quorum: float = 0.5
    local_steps: int = 1
    strategy: str | dict[str, Any] = "fedavg"


@dataclass(frozen=True, slots=True)
class LimitsSpec:
    """The limits of a job. It fails after ``wait`` seconds without progress: no quorum, no parameter server,
    no volume. A device that claims more than ``most_samples`` samples, or a larger share of a job's samples
    than ``most_share``, is refused, and so is an update whose loss counts more than ``most_count`` (tokens,
    for example) per sample. An update is scaled down to the L2 norm ``clip`` per sample.
    """

    wait: float = 300.0
    most_samples: int = 1 << 24
    most_share: float = 1.0
    most_count: float = 65536.0
    clip: float | None = None


@dataclass(frozen=True, slots=True)
class WorkSpec:
    """The part of a job that its workers need. With ``passes`` a worker trains so many times over the samples
    of an exchange, in batches of ``batch`` or (if that is 0) in ``steps`` equal batches, and answers with its
    difference; without, it answers with the sum of the gradients.

    ``local`` is what a strategy adds to local training. Tensors of the model whose names match
    ``local_layers`` stay with each worker.

    ``model`` is a task if ``task``, else a model alone. The job has ``total`` rounds or epochs. A share
    ``held_out`` of each private folder is not trained on. The other keys are those of ``TrainingSpec``.
    """

    name: str
    model: ModelSpec
    task: bool = False
    format: Literal["npy", "idx", "images"] = "npy"
    classes: tuple[str, ...] = ()
    seed: int = 0
    threads: int = 1
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    scheduler: SchedulerSpec = field(default_factory=SchedulerSpec)
    total: int = 1
    passes: int = 0
    batch: int = 0
    steps: int = 1
    accumulate: int = 1
    clip_norm: float | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    prefetch: int = 0
    held_out: float = 0.0
    encoding: Encoding = field(default_factory=Encoding)
    local: LocalRule = field(default_factory=LocalRule)
    local_layers: tuple[str, ...] = ()
    mini_epoch: int = 0

    def most_local_steps(self, samples: int) -> int:
        """Return the most local steps over so many samples: a batch is half full at least, or one group."""
        if not self.batch:
            return self.passes * self.steps
        if self.mini_epoch:  # of a size that the device may choose
            return self.passes * samples
        return self.passes * min(samples, 2 * samples // self.batch + 1)


@dataclass(frozen=True, slots=True)
class Job:
    """A training job: synchronous if it has such a table, else federated; it never has both tables. It has a
    task, or a model alone.

    It takes part with ``devices``, all of the fleet if none is named. Of the jobs that wait for a device, one
    with a higher ``priority`` begins first.

    Updates are added by ``aggregate``: the "host", the devices among themselves with one named as the root,
    or "auto": the devices where they have a LAN of their own and are faster so. Devices add by ``topology``;
    "auto" is the one that takes the least time by the rates of their links; "udp" is a star whose nodes
    exchange datagrams on their LAN.
    """

    name: str
    data: DataSpec
    model: ModelSpec | None = None
    task: ModelSpec | None = None
    seed: int = 0
    train: TrainingSpec = field(default_factory=TrainingSpec)
    federated: FederatedSpec | None = None
    synchronous: SynchronousSpec | None = None
    evaluate: EvaluationSpec = field(default_factory=EvaluationSpec)
    limits: LimitsSpec = field(default_factory=LimitsSpec)
    devices: tuple[str, ...] = ()
    priority: int = 0
    aggregate: str = "auto"
    topology: Literal["auto", "star", "tree", "ring", "udp"] = "auto"

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
        if self.limits.clip is not None:
            return "limits.clip"
        if self.averaging.buffer:
            return "federated.buffer"
        return "train.encoding" if self.work.encoding.name != "float32" else ""

    @property
    def averaging(self) -> FederatedSpec:
        """The table of a federated job, all of it defaults if the file has none."""
        return self.federated or FederatedSpec()

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
        if synchronous is None:
            local = {"passes": train.epochs, "batch": train.batch, "mini_epoch": train.mini_epoch}
        if synchronous is not None and synchronous.local_steps > 1:
            local = {"passes": 1, "steps": synchronous.local_steps}
        return WorkSpec(
            self.name,
            self.code,
            self.task is not None,
            self.data.format,
            self.data.classes,
            self.seed,
            train.threads,
            _optimizer(train.optimizer, train.learning_rate, train.momentum),
            SchedulerSpec(*_named(train.scheduler)),
            self.total,
            accumulate=train.accumulate,
            clip_norm=train.clip_norm,
            precision=train.precision,
            prefetch=train.prefetch,
            held_out=self.evaluate.held_out if "devices" in self.evaluate.on else 0.0,
            encoding=encoding_of(train.encoding, "the job"),
            local_layers=() if synchronous else self.averaging.local,
            **local,
        )

    @property
    def strategy(self) -> dict[str, Any]:
        """The table of the strategy, of no meaning for a job that exchanges gradients."""
        return as_table((self.synchronous or self.averaging).strategy)


def _named(given: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a table, or of a name alone."""
    table = {"name": given} if isinstance(given, str) else dict(given)
    return str(table.pop("name", "")), table


def _optimizer(given: str | dict[str, Any], rate: float | None, momentum: float) -> OptimizerSpec:
    name, arguments = _named(given)
    if name.lower() in ("", "sgd"):
        return OptimizerSpec(name, SGD_RATE if rate is None else rate, {"momentum": momentum, **arguments})
    return OptimizerSpec(name, rate, arguments)


def encoding_of(given: str | dict[str, Any], where: str) -> Encoding:
    """Return the encoding of a table, or of a name alone. Raises ConfigError."""
    found = load(Encoding, {"name": given} if isinstance(given, str) else given, where)
    if isinstance(given, dict) and "share" in given and found.name != "top-k":
        raise ConfigError(f"{where}: share: '{found.name}' sends all values; only top-k has a share")
    return found


def longer(job: Job, rounds: int) -> Job:
    """Return the same job with ``rounds`` rounds or epochs, and without an end before them."""
    job = replace(job, evaluate=replace(job.evaluate, target=None, patience=None))
    if job.synchronous:
        return replace(job, synchronous=replace(job.synchronous, epochs=rounds))
    return replace(job, federated=replace(job.averaging, rounds=rounds))
