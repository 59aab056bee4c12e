# SPDX-License-Identifier: Apache-2.0
"""Pure: a training job, as its TOML file describes it."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """The model: ``factory`` is ``module:callable``, called with ``arguments``; ``files`` are its code."""

    factory: str
    files: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """A worker's training in one round: ``epochs`` over its samples in batches of ``batch``, with ``threads``
    of its processor (0: all). Other numbers of threads round otherwise.
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

    A round ends when all devices have answered or ``deadline`` seconds have passed, and counts if ``quorum``
    of the devices (a share, 0..1) answered.
    """

    rounds: int = 20
    target: float | None = None
    deadline: float = 60.0
    quorum: float = 0.5


@dataclass(frozen=True, slots=True)
class SynchronousSpec:
    """Synchronous steps instead of rounds: ``epochs`` over all samples, fewer if ``target`` is reached.

    A step waits ``patience`` times as long as planned (0: for all workers), and late sums count in a later
    one. ``global_batch`` are the samples of a step, fewer where a worker's own would not last through the
    epoch; without it there are as many as the workers do best with, but an epoch has at least ``steps``. The
    learning rate of ``train`` is for ``train.batch`` samples; it follows the step's by ``scaling``, after
    ``warmup`` steps. A checkpoint is written each ``checkpoint`` seconds. ``host`` says whether the host
    computes, too.
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


@dataclass(frozen=True, slots=True)
class Job:
    """A training job: synchronous if it has such a table, else federated."""

    name: str
    data: DataSpec
    model: ModelSpec
    seed: int = 0
    train: TrainingSpec = field(default_factory=TrainingSpec)
    federated: FederatedSpec = field(default_factory=FederatedSpec)
    synchronous: SynchronousSpec | None = None


_MOST = 1e9


def check(job: Job, where: str) -> Job:
    """Return the same job if its values make sense. Raises ConfigError naming ``where`` and the key."""
    positive = {
        "train: learning_rate": job.train.learning_rate,
        "train: batch": job.train.batch,
        "train: epochs": job.train.epochs,
        "federated: rounds": job.federated.rounds,
        "federated: deadline": job.federated.deadline,
    }
    for key, value in positive.items():
        if not 0 < value <= _MOST:
            raise ConfigError(f"{where}: {key}: {value} is not greater than 0 and at most {_MOST:g}")
    shares = {"federated: quorum": job.federated.quorum, "federated: target": job.federated.target}
    for key, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"{where}: {key}: {share} is not between 0 and 1")
    if not 0 <= job.train.threads <= 1024:
        raise ConfigError(f"{where}: train: threads: {job.train.threads} is not between 0 and 1024")
    if not job.name or not all(c.isalnum() or c in "-_." for c in job.name) or job.name.startswith("."):
        raise ConfigError(f"{where}: name: '{job.name}' must be of letters, digits, '-', '_' and '.'")
    module, colon, attribute = job.model.factory.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{where}: model: factory: '{job.model.factory}' is not module:callable")
    if job.synchronous:
        _check_synchronous(job.synchronous, f"{where}: synchronous")
    return job


def _check_synchronous(synchronous: SynchronousSpec, where: str) -> None:
    """Check a synchronous job; one without epochs only measures its workers. Raises ConfigError."""
    bounds = {
        "epochs": (synchronous.epochs, 0, _MOST),
        "target": (synchronous.target, 0, 1),
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
