# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the trial of a job before any device is asked, on the host, where errors may be told: a
worker's part of an exchange, and the parameter server's, with some test samples and a model of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

from millpond.base.errors import LocalError
from millpond.train.api.fit import everything
from millpond.train.balance.curve import Ints
from millpond.train.job.spec import WorkSpec
from millpond.train.local.accelerator import device_of, moved
from millpond.train.local.evaluation import autocast, evaluate
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.selection import SampleFolders
from millpond.train.protocol import Folder, Update, Work
from millpond.train.server.server_optimizer import server_optimizer_of
from millpond.train.state import flat
from millpond.train.state.flat import Vector
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.strategies import Strategy
from millpond.train.task.task import SampleSet, Task

_BATCH, _BATCHES = 32, 8
"""The most samples of a batch, and the most batches that are looked at for one that counts."""
_LEAST = 2
"""BatchNorm has no variance of one sample."""
_SAME = 0.01
"""The share by which a loss may change and be the same: in bfloat16."""


def try_out(
    task: Task,
    model: nn.Module,
    work: WorkSpec,
    strategy: Strategy,
    samples: SampleSet,
    local: Collection[str] = (),
) -> None:
    """Train and score ``model``, which is of no use afterwards, and apply what comes of it, as ``work`` and
    ``strategy`` say; layers with ``local`` names are the worker's own. Raises LocalError for a loss that
    makes no sense, and any exception of the user's code.
    """
    worker = FlatParameters(model, local=local)
    state = worker.state.copy()
    few: SampleSet = Subset(samples, _counted(task, model, work, samples).tolist())  # type: ignore[arg-type]
    _check_sum(task, model, work, few)
    update = _train(task, worker, replace(work, local=strategy.local), few, state)
    task.summary(evaluate(model, task, everything(task, few), work))
    _apply(task, worker, work, strategy, update)


def _counted(task: Task, model: nn.Module, work: WorkSpec, samples: SampleSet) -> Ints:
    """Return the indices of the first batch whose loss counts anything: some samples may have no label."""
    size = max(_LEAST, min(work.batch or _BATCH // 2, _BATCH))
    found = count = 0.0
    model.train()
    for start in range(0, min(len(samples), _BATCHES * size), size):
        wanted = np.arange(start, min(start + size, len(samples)))
        wanted = np.resize(wanted, max(_LEAST, len(wanted)))
        loss, count = _loss(task, model, work, samples, wanted)
        found = loss.item()
        if count > 0:
            break
    if not count > 0 or not math.isfinite(found):
        raise LocalError(f"the task's loss is {found:g} over a count of {count:g}")
    if not loss.requires_grad:
        raise LocalError("the task's loss does not depend on a parameter that may be trained")
    return wanted


def _loss(
    task: Task, model: nn.Module, work: WorkSpec, samples: SampleSet, wanted: Ints
) -> tuple[torch.Tensor, float]:
    device = device_of(model)
    batch = moved(task.fetch([(samples, wanted)]), device)
    with autocast(work, device):
        return task.loss(model, batch)


@torch.no_grad()
def _check_sum(task: Task, model: nn.Module, work: WorkSpec, samples: SampleSet) -> None:
    """Raise LocalError for a mean in place of the sum of losses: with each sample twice it stays as it is,
    though the count is twice as large. Other losses of whole batches become another.
    """
    for module in model.modules():  # BatchNorm has the same statistics both times, but the draws differ
        module.train(not isinstance(module, nn.modules.dropout._DropoutNd))
    every = np.arange(len(samples))
    (once, count), (twice, double) = (
        _loss(task, model, work, samples, np.tile(every, times)) for times in (1, 2)
    )
    a, b = once.item(), twice.item()
    if double == 2 * count and abs(b - a) <= _SAME * abs(a) and a:
        raise LocalError(
            f"the task's loss is {a:g} over a count of {count:g}, and {b:g} with each sample twice: it must"
            ' return the sum of the losses, not their mean (reduction="sum")'
        )


def _train(
    task: Task, parameters: FlatParameters, work: WorkSpec, samples: SampleSet, state: Vector
) -> Update:
    """Train on made-up samples, as to measure a worker, and then for an exchange. Returns the update; its
    values are in ``parameters.sums``.
    """
    once = replace(work, passes=min(work.passes, 1), held_out=0.0, mini_epoch=0)
    folders = SampleFolders(task, work.seed, [Folder("host", "host")], [samples])
    if not (work.passes and work.batch):  # others are not measured
        made_up = Work(0, work.seed, 1, (), synthetic=len(samples))
        LocalTrainer(parameters, task, folders, once).run(made_up, state)
    every = Work(1, work.seed, 1, (((0, len(samples)),),))
    return LocalTrainer(parameters, task, folders, once).run(every, state)


def _apply(task: Task, worker: FlatParameters, work: WorkSpec, strategy: Strategy, update: Update) -> None:
    """Do the parameter server's part, and see that a checkpoint holds what its optimizer keeps."""
    local = worker.local | flat.constant_names(worker.model)
    model = worker.model.cpu().float()
    flat.freeze(model, local)
    parameters = FlatParameters(model, local=local)
    server = server_optimizer_of(parameters, work, strategy, task)
    parameters.sums[:] = worker.sums / max(update.weight, 1.0)
    server.apply(update.local_steps)
    server.momentum()
