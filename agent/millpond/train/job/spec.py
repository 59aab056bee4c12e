# SPDX-License-Identifier: Apache-2.0
"""Pure: a training job, as its TOML file describes it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from millpond.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The folders of the samples: ``private`` and ``public`` ones of every volume, ``test`` one of the host.

    ``classes`` (format ``images``) names the sub-folders by label. Without it each worker takes the sorted
    names of its own, which is right only where every worker has every class.
    """

    private: str
    test: str
    public: str | None = None
    format: Literal["npy", "idx", "images"] = "npy"
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model: ``factory`` is ``module:callable``, called with ``arguments``; ``files`` are its code, and
    ``signature`` is the file of a signature of it by an owner of devices.
    """

    factory: str
    files: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    signature: str = ""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer of torch's by name."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 1.0
    momentum: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """The training of one worker: the optimizer, ``epochs`` over its samples in one round in batches of
    ``batch``, with ``threads`` of its processor (0: all). Other numbers of threads round otherwise.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 0.05
    momentum: float = 0.9
    batch: int = 32
    epochs: int = 1
    threads: int = 1


@dataclass(frozen=True, slots=True)
class FederatedSpec:
    """Rounds of averaging: at most ``rounds``, fewer if the accuracy reaches ``target``.

    Each round asks ``fraction`` of the devices (a share, 0..1), but at least ``least`` of them, chosen anew.
    It ends when all have answered or ``deadline`` seconds have passed, and counts if ``quorum`` of the
    devices that were asked (a share, 0..1) answered. The ``server`` optimizer applies the weighted mean of
    the workers' differences: SGD at rate 1 is FedAvg, with momentum FedAvgM, Adam is FedAdam (Reddi et al.
    2021).
    """

    rounds: int = 20
    target: float | None = None
    deadline: float = 60.0
    quorum: float = 0.5
    fraction: float = 1.0
    least: int = 2
    server: OptimizerSpec = field(default_factory=OptimizerSpec)


@dataclass(frozen=True, slots=True)
class SynchronousSpec:
    """Synchronous steps instead of rounds: ``epochs`` over all samples, fewer if ``target`` is reached.

    A step waits ``patience`` times as long as planned (0: for all workers), and late sums count in a later
    one. ``global_batch`` are the samples of a step, fewer where a worker's own would not last through the
    epoch; without it there are as many as the workers do best with, but an epoch has at least ``steps``. The
    learning rate of ``train`` is for ``train.batch`` samples; it follows the step's by ``scaling``, after
    ``warmup`` steps. A checkpoint is written each ``checkpoint`` seconds. ``host`` says whether the host
    computes, too. The job waits while fewer than ``quorum`` of the devices (a share, 0..1) take part.

    With ``local_steps`` above 1, workers take so many local steps over their samples of an exchange, and
    differences are averaged instead of gradients (local SGD, Stich 2019).
    """

    epochs: int = 10
    target: float | None = None
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


@dataclass(frozen=True, slots=True)
class LimitsSpec:
    """The limits of a job. It fails after ``wait`` seconds without progress: no quorum, no parameter server,
    no volume. A device that claims more than ``most_samples`` samples, or a larger share of a job's samples
    than ``most_share``, is refused. An update is scaled down to the L2 norm ``clip`` per sample.
    """

    wait: float = 300.0
    most_samples: int = 1 << 24
    most_share: float = 1.0
    clip: float | None = None


@dataclass(frozen=True, slots=True)
class WorkSpec:
    """The part of a job that its workers need. With ``passes`` a worker trains so many times over the samples
    of an exchange, in batches of ``batch`` or (if that is 0) in ``steps`` equal batches, and answers with its
    difference; without, it answers with the sum of the gradients.
    """

    name: str
    model: ModelSpec
    format: Literal["npy", "idx", "images"] = "npy"
    classes: tuple[str, ...] = ()
    seed: int = 0
    threads: int = 1
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    passes: int = 0
    batch: int = 0
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Job:
    """A training job: synchronous if it has such a table, else federated; it never has both tables.

    It takes part with ``devices``, all of the fleet if none is named. Of the jobs that wait for a device, one
    with a higher ``priority`` begins first.
    """

    name: str
    data: DataSpec
    model: ModelSpec
    seed: int = 0
    train: TrainingSpec = field(default_factory=TrainingSpec)
    federated: FederatedSpec | None = None
    synchronous: SynchronousSpec | None = None
    limits: LimitsSpec = field(default_factory=LimitsSpec)
    devices: tuple[str, ...] = ()
    priority: int = 0

    @property
    def averaging(self) -> FederatedSpec:
        """The table of a federated job, all of it defaults if the file has none."""
        return self.federated or FederatedSpec()

    @property
    def quorum(self) -> float:
        """The share of the devices without which the job does not go on."""
        return self.synchronous.quorum if self.synchronous else self.averaging.quorum

    @property
    def target(self) -> float | None:
        """The accuracy at which the job ends early."""
        return self.synchronous.target if self.synchronous else self.averaging.target

    @property
    def exchanges_differences(self) -> bool:
        """Whether workers answer with differences after local training, rather than with gradients."""
        return self.synchronous is None or self.synchronous.local_steps > 1

    @property
    def work(self) -> WorkSpec:
        """The part that workers need."""
        train, synchronous = self.train, self.synchronous
        local = {"passes": train.epochs, "batch": train.batch} if synchronous is None else {}
        if synchronous is not None and synchronous.local_steps > 1:
            local = {"passes": 1, "steps": synchronous.local_steps}
        own = OptimizerSpec(train.optimizer, train.learning_rate, train.momentum)
        return WorkSpec(
            self.name,
            self.model,
            self.data.format,
            self.data.classes,
            self.seed,
            train.threads,
            own,
            **local,
        )

    @property
    def server(self) -> OptimizerSpec:
        """The optimizer of the parameter server."""
        if self.synchronous is None:
            return self.averaging.server
        if self.synchronous.local_steps > 1:
            return OptimizerSpec()
        return self.work.optimizer


def longer(job: Job, rounds: int) -> Job:
    """Return the same job with ``rounds`` rounds or epochs, and without a target that would end it early."""
    if job.synchronous:
        return replace(job, synchronous=replace(job.synchronous, epochs=rounds, target=None))
    return replace(job, federated=replace(job.averaging, rounds=rounds, target=None))


_MOST = 1e9


def check(job: Job, where: str) -> Job:
    """Return the same job if its values make sense. Raises ConfigError naming ``where`` and the key."""
    if job.federated and job.synchronous:
        raise ConfigError(f"{where}: a job is either federated or synchronous: remove one of the two tables")
    positive = {
        "train: learning_rate": job.train.learning_rate,
        "train: batch": job.train.batch,
        "train: epochs": job.train.epochs,
        "federated: rounds": job.averaging.rounds,
        "federated: deadline": job.averaging.deadline,
        "federated: server: learning_rate": job.averaging.server.learning_rate,
        "limits: wait": job.limits.wait,
        "limits: most_samples": job.limits.most_samples,
        "limits: most_share": job.limits.most_share,
    }
    if job.limits.clip is not None:
        positive["limits: clip"] = job.limits.clip
    for key, value in positive.items():
        if not 0 < value <= _MOST:
            raise ConfigError(f"{where}: {key}: {value} is not greater than 0 and at most {_MOST:g}")
    shares = {
        "federated: quorum": job.averaging.quorum,
        "federated: fraction": job.averaging.fraction,
        "federated: target": job.averaging.target,
        "train: momentum": job.train.momentum,
        "federated: server: momentum": job.averaging.server.momentum,
    }
    for key, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"{where}: {key}: {share} is not between 0 and 1")
    _check_queueing(job, where)
    check_work(job.work, where)
    if "/" in job.model.signature:
        raise ConfigError(f"{where}: model: signature: '{job.model.signature}' must be beside the job file")
    if job.synchronous:
        _check_synchronous(job.synchronous, f"{where}: synchronous")
    return job


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
    if not (module and colon and attribute):
        raise ConfigError(f"{where}: model: factory: '{work.model.factory}' is not module:callable")
    if min(work.passes, work.batch) < 0 or work.steps < 1:
        raise ConfigError(f"{where}: a worker cannot train in {work.steps} batches of {work.batch}")


def _check_synchronous(synchronous: SynchronousSpec, where: str) -> None:
    """Check a synchronous job; one without epochs only measures its workers. Raises ConfigError."""
    bounds = {
        "epochs": (synchronous.epochs, 0, _MOST),
        "target": (synchronous.target, 0, 1),
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
