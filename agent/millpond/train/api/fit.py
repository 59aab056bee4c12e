# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): training of a task in this process alone, ``millpond.train.fit``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from millpond.base.errors import LocalError
from millpond.train.determinism import generators
from millpond.train.job.spec import DataSpec, Job, ModelSpec, TrainingSpec
from millpond.train.local.batch_loop import BatchLoop
from millpond.train.local.evaluation import evaluate
from millpond.train.local.optimizers import Schedule, make_optimizer, set_mode
from millpond.train.local.selection import Selection
from millpond.train.task.task import SampleSet, Task


@dataclass(frozen=True, slots=True)
class Fitted:
    """A trained ``model``, the mean ``losses`` of its epochs or rounds, and its figures on the test data
    after each. After a simulated round, those on what the ``devices`` hold out, each with its own local
    layers and personal model.
    """

    model: nn.Module
    losses: list[float]
    scores: list[dict[str, float]]
    devices: list[dict[str, float]] = field(default_factory=list)


def fit(
    task: object,
    train: str | Path | Sequence[str | Path],
    test: str | Path = "",
    *,
    epochs: int = 1,
    seed: int = 0,
    tell: Callable[[str], None] = print,
    **training: Any,
) -> Fitted:
    """Train a task in this process alone, on one or several folders, and print a line for each epoch, with
    the task's figures on the folder ``test``. ``task`` has the hooks of ``train.task.task``; ``training``
    are the keys of a job's table ``[train]``: batch, learning_rate, optimizer, ... So a task is tried before
    it goes to a fleet. Raises LocalError, and any exception of the task.
    """
    spec = replace(TrainingSpec(**training), epochs=1)
    folders = [train] if isinstance(train, (str, Path)) else train
    job = Job("fit", DataSpec(""), task=ModelSpec("fit"), seed=seed, train=spec)
    work, hooks = replace(job.work, total=epochs), Task(task)
    generators.be_deterministic(work.threads)
    generators.plant(seed)
    model = hooks.model()
    parts = [hooks.dataset(Path(), str(folder), "train") for folder in folders]
    if not any(map(len, parts)):
        raise LocalError(f"{', '.join(map(str, folders))}: there are no samples")
    samples = everything(hooks, *parts)
    held_out = everything(hooks, hooks.dataset(Path(), str(test), "test")) if test else None
    optimizer = make_optimizer(model, work.optimizer, hooks)
    schedule = Schedule(optimizer, work.scheduler, epochs, hooks)
    loop, shuffle = BatchLoop(hooks, model, work), torch.Generator().manual_seed(seed)
    fitted = Fitted(model, [], [])
    for epoch in range(1, epochs + 1):
        model.train()
        schedule.set(optimizer, epoch)
        set_mode(optimizer, training=True)
        loss, count = loop.run(optimizer, samples, shuffle)
        loop.end(optimizer)
        fitted.losses.append(loss / count)
        figures = hooks.summary(evaluate(model, hooks, held_out, work)) if held_out else {}
        fitted.scores.append(figures)
        told = "".join(f", {name} {value:.4f}" for name, value in figures.items())
        tell(f"epoch {epoch}: training loss {fitted.losses[-1]:.4f}{told}")
    return fitted


def everything(task: Task, *parts: SampleSet) -> Selection:
    """Return all samples of some data sets."""
    indices = [np.arange(len(part)) for part in parts]
    return Selection(task, parts, indices, np.ones(sum(map(len, parts)), np.int64))
