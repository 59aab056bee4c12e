# SPDX-License-Identifier: Apache-2.0
"""Pure: a training job, as its TOML file describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from millpond.aggregate.encoding.layout import MOST_SHARE, Encoding
from millpond.base.errors import ConfigError
from millpond.base.schema import load
from millpond.train.strategies import catalogue
from millpond.train.strategies.catalogue import as_table, unfit_for_steps
from millpond.train.strategies.strategy import LocalRule


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The folders of the samples: ``private`` and ``public`` ones of every volume, ``test`` one of the host.

    A task of one's own reads them with its ``dataset``. Without one they hold labelled images in ``format``;
    ``classes`` (format ``images``) names the sub-folders by label, and is read from the test folder if left
    out.
    """

    private: str
    test: str = ""
    public: str | None = None
    format: Literal["npy", "idx", "images"] = "npy"
    classes: tuple[str, ...] = ()


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


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer of ``torch.optim`` by its ``name``, in any case, with its ``arguments``. Without a name
    it is that of the task, else SGD.
    """

    name: str = ""
    learning_rate: float = 1.0
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
    for SGD. A batch is computed in ``accumulate`` parts, which need less memory. Gradients are scaled down to
    the L2 norm ``clip_norm``. ``precision`` "bfloat16" is autocast. ``prefetch`` threads read the next
    batches meanwhile. Devices send their updates in ``encoding``: "float32", "bfloat16", "int8", "top-k", or
    a table with this ``name`` and the ``share`` (0..1) of the values that top-k sends.
    """

    optimizer: str | dict[str, Any] = ""
    learning_rate: float = 0.05
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
    """

    rounds: int = 20
    deadline: float | Literal["auto"] = 60.0
    quorum: float = 0.5
    fraction: float = 1.0
    least: int = 2
    strategy: str | dict[str, Any] = "fedavg"
    local: tuple[str, ...] = ()


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

    def most_local_steps(self, samples: int) -> int:
        """Return the most local steps over so many samples: a batch is half full at least, or one group."""
        if not self.batch:
            return self.passes * self.steps
        return self.passes * min(samples, 2 * samples // self.batch + 1)


@dataclass(frozen=True, slots=True)
class Job:
    """A training job: synchronous if it has such a table, else federated; it never has both tables. It has a
    task, or a model alone.

    It takes part with ``devices``, all of the fleet if none is named. Of the jobs that wait for a device, one
    with a higher ``priority`` begins first.

    Updates are added by ``aggregate``: the "host", the devices among themselves with one named as the root,
    or "auto": the devices where they have a LAN of their own and are faster so. Devices add by ``topology``;
    "auto" is the one that takes the least time by the rates of their links.
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
    topology: Literal["auto", "star", "tree", "ring"] = "auto"

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
        local: dict[str, Any] = {"passes": train.epochs, "batch": train.batch} if synchronous is None else {}
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
            encoding=_encoding(train.encoding, "the job"),
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


def _optimizer(given: str | dict[str, Any], rate: float, momentum: float | None = None) -> OptimizerSpec:
    name, arguments = _named(given)
    if momentum is not None and name.lower() in ("", "sgd"):
        arguments = {"momentum": momentum, **arguments}
    return OptimizerSpec(name, rate, arguments)


def _encoding(given: str | dict[str, Any], where: str) -> Encoding:
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


_MOST = 1e9


def check(job: Job, where: str) -> Job:
    """Return the same job if its values make sense. Raises ConfigError naming ``where`` and the key."""
    if (job.task is None) == (job.model is None):
        raise ConfigError(f"{where}: a job has one of the tables [task] and [model]")
    if job.federated and job.synchronous:
        raise ConfigError(f"{where}: a job is either federated or synchronous: remove one of the two tables")
    _check_positive(job, where)
    shares = {
        "federated: quorum": job.averaging.quorum,
        "federated: fraction": job.averaging.fraction,
        "evaluate: held_out": job.evaluate.held_out,
        "train: momentum": job.train.momentum,
    }
    for key, share in shares.items():
        if not 0 <= share <= 1:
            raise ConfigError(f"{where}: {key}: {share} is not between 0 and 1")
    if "lr" in job.train.optimizer and not isinstance(job.train.optimizer, str):
        raise ConfigError(f"{where}: train: optimizer: write learning_rate, not lr")
    _check_queueing(job, where)
    if job.aggregate not in ("auto", "host") and (key := job.adds_on_host):
        raise ConfigError(f"{where}: aggregate: with {key} the host has to add the updates")
    if "/" in job.code.signature:
        raise ConfigError(
            f"{where}: {job.table}: signature: '{job.code.signature}' must be beside the job file"
        )
    _check_evaluation(job, f"{where}: evaluate")
    if job.synchronous:
        _check_synchronous(job.synchronous, f"{where}: synchronous")
        _check_strategy_of_steps(job.synchronous, f"{where}: synchronous: strategy")
    else:
        catalogue.check(job.strategy, f"{where}: federated: strategy")
    _encoding(job.train.encoding, f"{where}: train: encoding")
    check_work(job.work, where)
    return job


def _check_positive(job: Job, where: str) -> None:
    positive: dict[str, float | None] = {
        "train: learning_rate": job.train.learning_rate,
        "train: batch": job.train.batch,
        "train: epochs": job.train.epochs,
        "train: accumulate": job.train.accumulate,
        "train: clip_norm": job.train.clip_norm,
        "federated: deadline": None if job.averaging.deadline == "auto" else job.averaging.deadline,
        "evaluate: every": job.evaluate.every,
        "evaluate: patience": job.evaluate.patience,
        "limits: wait": job.limits.wait,
        "limits: most_samples": job.limits.most_samples,
        "limits: most_share": job.limits.most_share,
        "limits: most_count": job.limits.most_count,
        "limits: clip": job.limits.clip,
    }
    for key, value in positive.items():
        if value is not None and not 0 < value <= _MOST:
            raise ConfigError(f"{where}: {key}: {value} is not greater than 0 and at most {_MOST:g}")
    if not 0 <= (rounds := job.averaging.rounds) <= _MOST:
        raise ConfigError(f"{where}: federated: rounds: {rounds} is not between 0 and {_MOST:.10g}")


def _check_evaluation(job: Job, where: str) -> None:
    evaluate = job.evaluate
    if "host" in evaluate.on and not job.data.test:
        raise ConfigError(f'{where}: on: "host" needs a folder of the host: data.test')
    if "devices" in evaluate.on and not 0 < evaluate.held_out < 1:
        raise ConfigError(f"{where}: held_out: {evaluate.held_out} holds no samples out, or all")
    if "host" in evaluate.on and job.averaging.local:
        raise ConfigError(f'{where}: on: layers of federated.local are on devices alone: on = ["devices"]')
    if len(set(evaluate.on)) < len(evaluate.on):
        raise ConfigError(f"{where}: on: a place is named twice")
    if evaluate.target is not None and not math.isfinite(evaluate.target):
        raise ConfigError(f"{where}: target: {evaluate.target} is never reached")
    if not evaluate.on and (evaluate.target is not None or evaluate.patience is not None):
        raise ConfigError(f"{where}: without a place in 'on' there is nothing to end the job early")


def _check_queueing(job: Job, where: str) -> None:
    for name in job.devices:
        if job.devices.count(name) > 1:
            raise ConfigError(f"{where}: devices: '{name}' is named twice")
    if abs(job.priority) > _MOST:
        raise ConfigError(f"{where}: priority: {job.priority} is not between {-_MOST:.10g} and {_MOST:.10g}")


def check_work(work: WorkSpec, where: str) -> None:
    """Check the part of a job that its workers need. Raises ConfigError."""
    if not 0 <= work.threads <= 1024:
        raise ConfigError(f"{where}: train: threads: {work.threads} is not between 0 and 1024")
    if not work.name or not all(c.isalnum() or c in "-_." for c in work.name) or work.name.startswith("."):
        raise ConfigError(f"{where}: name: '{work.name}' must be of letters, digits, '-', '_' and '.'")
    module, colon, attribute = work.model.factory.partition(":")
    table = "task" if work.task else "model"
    if not module or bool(colon) != bool(attribute) or not (attribute or work.task):
        raise ConfigError(f"{where}: {table}: factory: '{work.model.factory}' is not module:callable")
    if not 0 <= work.prefetch <= 64:
        raise ConfigError(f"{where}: train: prefetch: {work.prefetch} is not between 0 and 64")
    if not (0 <= work.held_out < 1 and 1 <= work.accumulate <= _MOST and 0 <= work.total <= _MOST):
        raise ConfigError(f"{where}: a share of the samples or a number of parts makes no sense")
    if not 0 < work.encoding.share <= MOST_SHARE:
        share = work.encoding.share
        raise ConfigError(f"{where}: train: encoding: share: {share} is not above 0 and at most {MOST_SHARE}")
    if not all(work.local_layers):
        raise ConfigError(f"{where}: federated: local: a pattern is empty")
    if min(work.passes, work.batch) < 0 or work.steps < 1:
        raise ConfigError(f"{where}: a worker cannot train in {work.steps} batches of {work.batch}")


def _check_strategy_of_steps(synchronous: SynchronousSpec, where: str) -> None:
    """Refuse what makes no sense in synchronous steps. Raises ConfigError."""
    strategy = catalogue.check(synchronous.strategy, where)
    if synchronous.local_steps == 1:
        if synchronous.strategy != "fedavg":
            raise ConfigError(f"{where}: applies differences, not gradients: set local_steps, or [federated]")
    elif strategy and (fault := unfit_for_steps(strategy)):
        raise ConfigError(f"{where}: {fault}; it is for [federated]")


def _check_synchronous(synchronous: SynchronousSpec, where: str) -> None:
    """Check a synchronous job; one without epochs only measures its workers. Raises ConfigError."""
    bounds = {
        "epochs": (synchronous.epochs, 0, _MOST),
        "quorum": (synchronous.quorum, 0, 1),
        "local_steps": (synchronous.local_steps, 1, 1 << 16),
        "global_batch": (synchronous.global_batch, 2, 1 << 20),
        "steps": (synchronous.steps, 1, _MOST),
        "warmup": (synchronous.warmup, 0, _MOST),
        "checkpoint": (synchronous.checkpoint, 0.1, _MOST),
    }
    for key, (value, least, most) in bounds.items():
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{where}: {key}: {value} is not between {least} and {most:.10g}")
    if synchronous.patience and not 1 <= synchronous.patience <= _MOST:
        raise ConfigError(f"{where}: patience: {synchronous.patience} is neither 0 nor at least 1")
