# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): rounds of federated averaging over folders in this process alone, see ``train.simulate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millpond.train.compute.evaluation import evaluate
from millpond.train.compute.fit import Fitted, everything
from millpond.train.compute.local_trainer import LocalTrainer
from millpond.train.compute.optimizers import make_optimizer
from millpond.train.compute.selection import SampleFolders
from millpond.train.compute.server_optimizer import ServerOptimizer
from millpond.train.determinism import generators, seeds
from millpond.train.job.spec import DataSpec, FederatedSpec, Job, ModelSpec, TrainingSpec, WorkSpec
from millpond.train.protocol import Folder, Work
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.task.sums import LOSS
from millpond.train.task.task import Task

LEAST_SAMPLES = 8
"""The samples of a group of private samples, as devices have them by default."""


def simulate(
    task: object,
    folders: Sequence[str | Path],
    test: str | Path = "",
    *,
    rounds: int = 20,
    seed: int = 0,
    server: dict[str, Any] | None = None,
    tell: Callable[[str], None] = print,
    **training: Any,
) -> Fitted:
    """Implement ``train.simulate``."""
    federated = FederatedSpec(rounds=rounds, server=server or {})
    spec = TrainingSpec(**training)
    job = Job("simulation", DataSpec(""), task=ModelSpec(""), seed=seed, train=spec, federated=federated)
    hooks = Task(task)
    generators.be_deterministic(job.work.threads)
    average, worker = _model(hooks, seed), _model(hooks, seed)
    devices = [_device(hooks, worker, number, path, job.work) for number, path in enumerate(folders)]
    optimizer = ServerOptimizer(average, make_optimizer(average.model, job.server, hooks))
    held_out = everything(hooks, hooks.dataset(Path(), str(test), "test")) if test else None
    fitted = Fitted(average.model, [], [])
    for number in range(1, rounds + 1):
        fitted.losses.append(_round(number, seed, average, worker, devices))
        optimizer.apply(1.0, number)
        figures = hooks.summary(evaluate(average.model, hooks, held_out, job.work)) if held_out else {}
        fitted.scores.append(figures)
        told = "".join(f", {name} {value:.4f}" for name, value in figures.items())
        tell(f"round {number}: training loss {fitted.losses[-1]:.4f}{told}")
    return fitted


def _model(task: Task, seed: int) -> FlatParameters:
    generators.plant(seed)
    return FlatParameters(task.model())


def _device(
    task: Task, parameters: FlatParameters, number: int, folder: str | Path, work: WorkSpec
) -> tuple[LocalTrainer, int]:
    """Return the trainer of a device and its number of samples."""
    name = f"csd{number}"
    part = task.dataset(Path(), str(folder), "train")
    own = SampleFolders(task, work.seed, [Folder(name, name, group=LEAST_SAMPLES)], [part])
    return LocalTrainer(parameters, task, own, work), len(part)


def _round(
    number: int,
    seed: int,
    average: FlatParameters,
    worker: FlatParameters,
    devices: Sequence[tuple[LocalTrainer, int]],
) -> float:
    """Set ``average.sums`` to the mean difference of a round. Returns the mean training loss."""
    total, weight, loss, count = np.zeros(len(average.sums)), 0.0, 0.0, 0.0
    for rank, (trainer, samples) in enumerate(devices):
        request = Work(number, seeds.derive(seed, str(rank), number), number, (((0, samples),),))
        update = trainer.run(request, average.state)
        total += worker.sums
        weight += update.weight
        loss, count = loss + update.metrics[LOSS][0], count + update.metrics[LOSS][1]
    average.sums[:] = total / weight
    return loss / count
