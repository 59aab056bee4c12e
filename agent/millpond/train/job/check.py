# SPDX-License-Identifier: Apache-2.0
"""Pure: whether the values of a training job make sense, each alone and together."""

from __future__ import annotations

import math
from pathlib import PurePosixPath

from millpond.aggregate.encoding.layout import MOST_SHARE
from millpond.base.errors import ConfigError
from millpond.train.job.spec import Job, SynchronousSpec, WorkSpec, encoding_of
from millpond.train.strategies import catalogue
from millpond.train.strategies.catalogue import unfit_for_lateness, unfit_for_steps

_MOST = 1e9
MOST_BUFFER = 1024
"""Updates in a buffer: the unit of its sum, and the error of its mean, grow with it."""


MOST_ARGUMENTS = 1000
MOST_NAME = 200
"""Bytes of a job's name: files and memory are named after it."""


def check(job: Job, where: str) -> Job:
    """Return the same job if its values make sense. Raises ConfigError naming ``where`` and the key."""
    if (job.task is None) == (job.model is None):
        raise ConfigError(f"{where}: a job has one of the tables [task] and [model]")
    if job.federated and job.synchronous:
        raise ConfigError(f"{where}: a job is either federated or synchronous: remove one of the two tables")
    if (given := len(job.code.arguments)) > MOST_ARGUMENTS:
        raise ConfigError(f"{where}: {job.table}: arguments: {given} are too many, {MOST_ARGUMENTS} at most")
    _check_positive(job, where)
    _check_data(job, f"{where}: data")
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
    _check_aggregation(job, where)
    if "/" in job.code.signature:
        raise ConfigError(
            f"{where}: {job.table}: signature: '{job.code.signature}' must be beside the job file"
        )
    _check_evaluation(job, f"{where}: evaluate")
    if job.synchronous:
        _check_synchronous(job.synchronous, f"{where}: synchronous")
        _check_strategy_of_steps(job.synchronous, f"{where}: synchronous: strategy")
    else:
        _check_lateness(job, f"{where}: federated")
    encoding_of(job.train.encoding, f"{where}: train: encoding")
    check_work(job.work, where)
    return job


def _check_data(job: Job, where: str) -> None:
    """Refuse data that no worker can read. Raises ConfigError."""
    data, found = job.data, job.data.of_device
    if found and not (
        found.device and found.path.startswith("public/") and ".." not in PurePosixPath(found.path).parts
    ):
        text = f"'{data.public}': of one device, public folders alone are read, such as csd0:public/digits"
        raise ConfigError(f"{where}: public: {text}")
    if found and job.devices and found.device not in job.devices:
        raise ConfigError(f"{where}: public: '{found.device}' is none of the job's devices")
    if data.private:
        return
    if not found:
        text = (
            "it is missing; a job without private data has a public folder of one device, csd0:public/digits"
        )
        raise ConfigError(f"{where}: private: {text}")
    if job.synchronous is None:
        text = "without data.private its samples are streamed, which is for [synchronous] jobs"
        raise ConfigError(f"{where}: public: {text}")
    if "devices" in job.evaluate.on:
        raise ConfigError(
            f"{where}: private: devices hold out private samples, and there are none: evaluate.on"
        )


def _check_aggregation(job: Job, where: str) -> None:
    """Refuse devices that add where they cannot. Raises ConfigError."""
    if job.aggregate not in ("auto", "host") and (key := job.adds_on_host):
        raise ConfigError(f"{where}: aggregate: with {key} the host has to add the updates")
    if job.topology == "udp" and (
        key := 'aggregate = "host"' if job.aggregate == "host" else job.adds_on_host
    ):
        raise ConfigError(f"{where}: topology: with {key} no device adds, by datagrams or otherwise")


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
    if job.synchronous and job.train.mini_epoch:
        raise ConfigError(f"{where}: train: mini_epoch: it is for [federated], whose workers have epochs")
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


def _check_lateness(job: Job, where: str) -> None:
    """Refuse what makes no sense where updates of several rounds are averaged. Raises ConfigError."""
    spec, strategy = job.averaging, catalogue.check(job.strategy, f"{where}: strategy")
    bounds = {"buffer": (spec.buffer, MOST_BUFFER), "max_staleness": (spec.max_staleness or 0, 1 << 16)}
    for key, (value, most) in bounds.items():
        if not 0 <= value <= most:
            raise ConfigError(f"{where}: {key}: {value} is not between 0 and {most}")
    key = "buffer" if spec.buffer else "late" if spec.late == "carry" else ""
    if spec.max_staleness is not None and not key:
        raise ConfigError(f'{where}: max_staleness: without a buffer or late = "carry" no update is stale')
    if key and strategy:
        repeats = bool(spec.buffer)
        if fault := unfit_for_lateness(strategy.combine, strategy.local, repeats=repeats):
            raise ConfigError(f"{where}: {key}: {fault}")
    refused = {
        "deadline": spec.deadline == "auto",
        "fraction": spec.fraction < 1,
        "late": spec.late == "carry",
        "local": bool(spec.local),
    }
    if spec.buffer and (other := next((name for name, found in refused.items() if found), "")):
        raise ConfigError(f"{where}: buffer: asynchronous rounds have no '{other}': remove that key")
    if spec.buffer and "devices" in job.evaluate.on:
        raise ConfigError(f"{where}: buffer: asynchronous devices are never all free to score: evaluate.on")


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
    _check_name(work.name, where)
    module, colon, attribute = work.model.factory.partition(":")
    table = "task" if work.task else "model"
    if not module or bool(colon) != bool(attribute) or not (attribute or work.task):
        raise ConfigError(f"{where}: {table}: factory: '{work.model.factory}' is not module:callable")
    if not 0 <= work.prefetch <= 64:
        raise ConfigError(f"{where}: train: prefetch: {work.prefetch} is not between 0 and 64")
    if work.mini_epoch and not work.batch <= work.mini_epoch <= _MOST:
        least = f"train.batch, {work.batch}"
        raise ConfigError(f"{where}: train: mini_epoch: {work.mini_epoch} is not at least {least}")
    if not (0 <= work.held_out < 1 and 1 <= work.accumulate <= _MOST and 0 <= work.total <= _MOST):
        raise ConfigError(f"{where}: a share of the samples or a number of parts makes no sense")
    if not 0 < work.encoding.share <= MOST_SHARE:
        share = work.encoding.share
        raise ConfigError(f"{where}: train: encoding: share: {share} is not above 0 and at most {MOST_SHARE}")
    if not all(work.local_layers):
        raise ConfigError(f"{where}: federated: local: a pattern is empty")
    if min(work.passes, work.batch) < 0 or work.steps < 1:
        raise ConfigError(f"{where}: a worker cannot train in {work.steps} batches of {work.batch}")


def _check_name(name: str, where: str) -> None:
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise ConfigError(f"{where}: name: '{name}' must be of letters, digits, '-', '_' and '.'")
    if len(name.encode()) > MOST_NAME:
        raise ConfigError(f"{where}: name: '{name:.20}...' is longer than {MOST_NAME} bytes")


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
