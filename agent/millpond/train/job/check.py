# SPDX-License-Identifier: Apache-2.0
"""Pure: whether the values of a training job make sense, each alone and together."""

from __future__ import annotations

import math
from pathlib import PurePosixPath

from millpond.aggregate.encoding.layout import MOST_SHARE, PLAIN
from millpond.base.errors import ConfigError
from millpond.base.keys import MOST, check_keys
from millpond.train.job.encodings import encoding_of
from millpond.train.job.spec import DataSpec, Job, SynchronousSpec, WorkSpec, scheduler_of
from millpond.train.repeats import weights_of
from millpond.train.strategies import catalogue
from millpond.train.strategies.catalogue import unfit_for_lateness, unfit_for_steps

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
    check_keys(job, where)
    _check_data(job, f"{where}: data")
    _check_training(job, f"{where}: train")
    if len(set(job.devices)) < len(job.devices):
        twice = next(name for name in job.devices if job.devices.count(name) > 1)
        raise ConfigError(f"{where}: devices: '{twice}' is named twice")
    _check_aggregation(job, where)
    if "/" in job.code.signature:
        raise ConfigError(
            f"{where}: {job.table}: signature: '{job.code.signature}' must be beside the job file"
        )
    _check_evaluation(job, f"{where}: evaluate")
    _check_privacy(job, f"{where}: privacy")
    if job.synchronous:
        _check_steps(job.synchronous, f"{where}: synchronous")
    else:
        _check_lateness(job, f"{where}: federated")
        _check_secure(job, f"{where}: federated")
    if job.outer and (job.averaging.buffer or job.averaging.late == "carry"):
        key = "buffer" if job.averaging.buffer else "late"
        raise ConfigError(f"{where}: outer: an outer round ends with all its updates: remove federated.{key}")
    encoding_of(job.train.encoding, f"{where}: train: encoding")
    check_work(job.work, where)
    return job


def _check_training(job: Job, where: str) -> None:
    """Refuse an optimizer, a scheduler and mini-epochs that the kind of job cannot have. Raises
    ConfigError.
    """
    if "lr" in job.train.optimizer and not isinstance(job.train.optimizer, str):
        raise ConfigError(f"{where}: optimizer: write learning_rate, not lr")
    each = scheduler_of(job.train.scheduler).each
    if each not in ("epoch", "step"):
        raise ConfigError(f'{where}: scheduler: each: \'{each}\' is neither "epoch" nor "step"')
    if each == "step" and job.exchanges_differences:
        raise ConfigError(f'{where}: scheduler: each = "step" is for [synchronous] with local_steps 1')
    if not job.exchanges_differences and (job.train.mini_epoch or job.train.repeat):
        key = "mini_epoch" if job.train.mini_epoch else "repeat"
        told = "a step of one gradient has no epochs: set synchronous.local_steps above 1"
        raise ConfigError(f"{where}: {key}: {told}")


def _check_data(job: Job, where: str) -> None:
    """Refuse data that no worker can read. Raises ConfigError."""
    data, found = job.data, job.data.of_device
    _check_images(data, where)
    if data.private and not _is_private(PurePosixPath(data.private), data.private):
        text = f"'{data.private}': it is a folder below private/ on each device, such as private/digits"
        raise ConfigError(f"{where}: private: {text}")
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


def _check_images(data: DataSpec, where: str) -> None:
    """Refuse sides of images that cannot be. Raises ConfigError."""
    if data.resize and data.format != "images":
        raise ConfigError(f'{where}: resize: pictures alone are scaled, of format = "images"')
    if data.resize and data.crop > data.resize:
        raise ConfigError(f"{where}: crop: {data.crop} is more than resize, {data.resize}")
    if data.is_streamed and (key := next((k for k in ("resize", "crop", "flip") if getattr(data, k)), "")):
        raise ConfigError(f"{where}: {key}: streamed images come as they are stored")


def _is_private(path: PurePosixPath, text: str) -> bool:
    """Return whether agents take a path for that of a private folder."""
    is_plain = str(path) == text and ".." not in path.parts
    return (
        is_plain and path.parts[0] == "private" and not any(part.startswith(".") for part in path.parts[1:2])
    )


def _check_aggregation(job: Job, where: str) -> None:
    """Refuse devices that add where they cannot. Raises ConfigError."""
    if job.aggregate not in ("auto", "host") and (key := job.adds_on_host):
        raise ConfigError(f"{where}: aggregate: with {key} the host has to add the updates")
    if job.topology == "udp" and (
        key := 'aggregate = "host"' if job.aggregate == "host" else job.adds_on_host
    ):
        raise ConfigError(f"{where}: topology: with {key} no device adds, by datagrams or otherwise")
    if not job.repair and job.averaging.secure:
        raise ConfigError(f"{where}: repair: masks cancel in the sum of whole updates alone")
    if not job.repair and (fault := _unfit_for_losses(job, where)):
        raise ConfigError(f"{where}: repair: {fault}")


def _unfit_for_losses(job: Job, where: str) -> str:
    """Return why lost datagrams may not be left out of a job's means, "" if they may."""
    if job.topology != "udp":
        return 'without topology = "udp" nothing is lost'
    if job.synchronous is not None:
        return "workers of a [synchronous] job must have the same model, and a lost part would differ"
    if job.averaging.fraction < 1 or job.averaging.late == "carry":
        return 'all devices must take part in all rounds: no fraction below 1, no late = "carry"'
    strategy = catalogue.check(job.strategy, f"{where}: strategy")
    return catalogue.beyond_averaging(strategy) if strategy else ""


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


def _check_secure(job: Job, where: str) -> None:
    """Refuse what masks of a cohort do not go with. Raises ConfigError."""
    spec = job.averaging
    if spec.sum_bits == 32 and job.limits.clip is None:
        raise ConfigError(f"{where}: sum_bits: sums of 32 bits need a public bound: set limits.clip")
    if not (spec.secure or job.privacy):
        return
    where = f"{where}: secure" if spec.secure else f"{where}: with [privacy]"
    if job.limits.clip is None:
        raise ConfigError(f"{where}: sums of masked or noisy values need a public bound: set limits.clip")
    strategy = catalogue.check(job.strategy, where)
    refused = {
        "federated.buffer": bool(spec.buffer),
        'federated.late = "carry"': spec.late == "carry",
        "train.encoding": job.work.encoding.name != PLAIN,
        'evaluate.on = ["devices"]': "devices" in job.evaluate.on,
        "data.public, on which the host trains": job.data.public is not None,
        f"the rule '{strategy.combine.rule}'" if strategy else "": bool(strategy and strategy.combine.votes),
        "federated.strategy, which normalizes differences": bool(strategy and strategy.local.normalized),
    }
    if other := next((name for name, found in refused.items() if found), ""):
        raise ConfigError(f"{where}: the host sees sums alone, which does not go with {other}")


def _check_privacy(job: Job, where: str) -> None:
    """Refuse what noise does not go with, besides what masks do not. Raises ConfigError."""
    if job.privacy is None:
        return
    if job.synchronous:
        raise ConfigError(f"{where}: noise is planned for the rounds of [federated] alone")
    if job.outer:
        raise ConfigError(f"{where}: an outer job has no number of rounds to plan noise for: remove [outer]")
    if job.train.mini_epoch and job.privacy.unit == "group":
        raise ConfigError(f'{where}: unit = "group" trains on each group alone: remove train.mini_epoch')
    strategy = catalogue.check(job.strategy, where)
    if job.privacy.unit == "group" and (job.averaging.local or (strategy and strategy.local.personal)):
        told = "what a device keeps of one group would change the updates of others: remove federated.local"
        raise ConfigError(f'{where}: unit = "group": {told}, and personal strategies')
    if job.train.repeat:
        raise ConfigError(f"{where}: how often a rule repeats would tell of the samples: remove train.repeat")


def check_work(work: WorkSpec, where: str) -> None:
    """Check the part of a job that its workers need. Raises ConfigError."""
    check_keys(work, where)
    _check_name(work.name, where)
    module, colon, attribute = work.model.factory.partition(":")
    table = "task" if work.task else "model"
    if not module or bool(colon) != bool(attribute) or not (attribute or work.task):
        raise ConfigError(f"{where}: {table}: factory: '{work.model.factory}' is not module:callable")
    if work.mini_epoch and not work.batch <= work.mini_epoch:
        least = f"train.batch, {work.batch}"
        raise ConfigError(f"{where}: train: mini_epoch: {work.mini_epoch} is not at least {least}")
    if work.repeat.name:
        _check_repeat(work, f"{where}: train: repeat")
    if work.held_out == 1:
        raise ConfigError(f"{where}: held_out: all samples are held out")
    if not 0 < work.encoding.share <= MOST_SHARE:
        share = work.encoding.share
        raise ConfigError(f"{where}: train: encoding: share: {share} is not above 0 and at most {MOST_SHARE}")
    if not all(work.local_layers):
        raise ConfigError(f"{where}: federated: local: a pattern is empty")


def _check_repeat(work: WorkSpec, where: str) -> None:
    if not work.mini_epoch:
        raise ConfigError(f"{where}: it is for mini-epochs: set train.mini_epoch, too")
    if work.passes < 2:
        raise ConfigError(f"{where}: it repeats train.epochs times at most: set epochs above 1")
    rule = work.repeat.rule(work.passes, where)
    if weights_of(rule)[2] and not work.held_out:
        devices = 'evaluate.on = ["devices"]'
        raise ConfigError(f"{where}: weights: a validation error needs samples that are held out: {devices}")


def _check_name(name: str, where: str) -> None:
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise ConfigError(f"{where}: name: '{name}' must be of letters, digits, '-', '_' and '.'")
    if len(name.encode()) > MOST_NAME:
        raise ConfigError(f"{where}: name: '{name:.20}...' is longer than {MOST_NAME} bytes")


def _check_steps(synchronous: SynchronousSpec, where: str) -> None:
    """Refuse what makes no sense in synchronous steps. Raises ConfigError."""
    if synchronous.patience and not 1 <= synchronous.patience <= MOST:
        raise ConfigError(f"{where}: patience: {synchronous.patience} is neither 0 nor at least 1")
    strategy = catalogue.check(synchronous.strategy, f"{where}: strategy")
    if synchronous.local_steps == 1:
        if synchronous.strategy != "fedavg":
            text = "applies differences, not gradients: set local_steps, or [federated]"
            raise ConfigError(f"{where}: strategy: {text}")
    elif strategy and (fault := unfit_for_steps(strategy)):
        raise ConfigError(f"{where}: strategy: {fault}; it is for [federated]")
