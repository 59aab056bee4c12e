"""Pure: what a job is, as its TOML file says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from millpond.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Data:
    """Where the samples lie: ``private``, ``public`` folders of every volume, ``test`` one of the host.

    ``classes`` (format ``images``) names the sub-folders by label. Without it each worker takes the sorted
    names of its own, which is right only where every worker has every class.
    """

    private: str
    test: str
    public: str | None = None
    format: Literal["npy", "idx", "images"] = "npy"
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """``factory`` is ``module:callable``, called with ``arguments``; ``files`` are the user's code for it."""

    factory: str
    files: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Training:
    """What a worker does in one round: ``epochs`` over its samples in batches of ``batch``."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 0.05
    momentum: float = 0.9
    batch: int = 32
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class Federated:
    """Rounds of averaging: at most ``rounds``, fewer if the accuracy reaches ``target``.

    A round ends when all devices have answered or ``deadline`` seconds have passed, and counts if ``quorum``
    of the devices (a share, 0..1) answered.
    """

    rounds: int = 20
    target: float | None = None
    deadline: float = 60.0
    quorum: float = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """A training job."""

    name: str
    data: Data
    model: Model
    seed: int = 0
    train: Training = field(default_factory=Training)
    federated: Federated = field(default_factory=Federated)


_MOST = 1e9


def check(job: Job, where: str) -> Job:
    """The same job if its values make sense. Raises ConfigError naming ``where`` and the key."""
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
    if not job.name or not all(c.isalnum() or c in "-_." for c in job.name) or job.name.startswith("."):
        raise ConfigError(f"{where}: name: '{job.name}' must be of letters, digits, '-', '_' and '.'")
    module, colon, attribute = job.model.factory.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{where}: model: factory: '{job.model.factory}' is not module:callable")
    return job
