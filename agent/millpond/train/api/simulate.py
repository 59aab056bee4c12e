# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): rounds of federated training over folders in one process, ``millpond.train.simulate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from millpond.aggregate.kernels import Vector
from millpond.aggregate.reduction import Addend, Reduction
from millpond.aggregate.rules.catalogue import rule_of
from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError
from millpond.train.api.fit import Fitted, everything
from millpond.train.determinism import generators, seeds
from millpond.train.job.spec import DataSpec, FederatedSpec, Job, ModelSpec, TrainingSpec, WorkSpec
from millpond.train.local.evaluation import evaluate
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.selection import SampleFolders
from millpond.train.protocol import Folder, Update, Work
from millpond.train.server.server_optimizer import ServerOptimizer, optimizer_of
from millpond.train.state import flat, layout
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.strategies import Strategy, catalogue
from millpond.train.task.sums import LOSS, Sums, add
from millpond.train.task.task import Task
from millpond.train.update_bounds import UpdateBounds

LEAST_SAMPLES = 8
"""The samples of a group of private samples, as devices have them by default."""


def simulate(
    task: object,
    folders: Sequence[str | Path],
    test: str | Path = "",
    *,
    rounds: int = 20,
    seed: int = 0,
    strategy: str | dict[str, Any] | Strategy = "fedavg",
    local: Sequence[str] = (),
    held_out: float = 0.0,
    tell: Callable[[str], None] = print,
    **training: Any,
) -> Fitted:
    """Simulate federated averaging in this process alone: each of ``folders`` is the private folder of a
    device, csd0, csd1, ... A fleet with these folders computes the same, but for random draws of models,
    which are each device's own. ``strategy`` is that of a job's file or an object of a class of
    one's own, ``local`` are patterns of layers that stay on their devices, and ``training`` the keys of
    ``[train]``. Devices are scored, too, on a share ``held_out`` of their samples. Otherwise as ``fit``.
    """
    own = _made(strategy)
    if test and local:
        raise LocalError("test: local layers have trained values on devices alone: set held_out instead")
    federated, spec = FederatedSpec(rounds=rounds, local=tuple(local)), TrainingSpec(**training)
    job = Job("simulation", DataSpec(""), task=ModelSpec(""), seed=seed, train=spec, federated=federated)
    work = replace(job.work, local=own.local, held_out=held_out)
    hooks = Task(task)
    generators.be_deterministic(work.threads)
    average, worker = _model(hooks, seed, local), _model(hooks, seed, local)
    flat.freeze(average.model, average.local)
    devices = [_Device(hooks, worker, number, path, work) for number, path in enumerate(folders)]
    devices = [device for device in devices if device.takes_part(tell)]
    if not devices:
        raise LocalError(f"no folder has the {LEAST_SAMPLES} samples that a device answers for at least")
    bounds = UpdateBounds.of(job, 0, normalized=own.local.normalized)
    optimizer = ServerOptimizer(average, optimizer_of(own, average.model), differences=True)
    end = layout.parameters_end(average.tensors)
    reduction = Reduction(average.sums, 0, rule_of(own.combine.rule, own.combine.share), end)
    tested = everything(hooks, hooks.dataset(Path(), str(test), "test")) if test else None
    fitted = Fitted(average.model, [], [])
    for number in range(1, rounds + 1):
        loss, local_steps = _round(number, seed, average.state, devices, reduction, bounds)
        fitted.losses.append(loss)
        optimizer.apply(local_steps, number)
        figures = hooks.summary(evaluate(average.model, hooks, tested, work)) if tested else {}
        fitted.scores.append(figures)
        fitted.devices.append(_scored(number, average.state, devices, hooks) if held_out else {})
        shown = [*figures.items(), *((f"devices {name}", each) for name, each in fitted.devices[-1].items())]
        told = "".join(f", {name} {value:.4f}" for name, value in shown)
        tell(f"round {number}: training loss {fitted.losses[-1]:.4f}{told}")
    return fitted


def _made(strategy: str | dict[str, Any] | Strategy) -> Strategy:
    if isinstance(strategy, Strategy):
        return strategy
    if (found := catalogue.check(strategy, "strategy")) is None:
        raise LocalError("strategy: give an object of the class itself, not its factory")
    return found


def _model(task: Task, seed: int, local: Sequence[str]) -> FlatParameters:
    generators.plant(seed)
    model = task.model()
    return FlatParameters(model, local=flat.local_names(model, local))


class _Device:
    """A device with the samples of ``folder``, and its last update."""

    def __init__(
        self, task: Task, parameters: FlatParameters, number: int, folder: str | Path, work: WorkSpec
    ) -> None:
        self.name, self.rank, self._parameters, self._folder = f"csd{number}", number, parameters, folder
        part = task.dataset(Path(), str(folder), "train")
        private = Folder(self.name, self.name, group=LEAST_SAMPLES)
        own = SampleFolders(task, work.seed, [private], [part], work.held_out)
        self._trainer, self._samples = LocalTrainer(parameters, task, own, work), own.counts[0]
        self._values, self._next = np.empty_like(parameters.sums), 0

    def takes_part(self, tell: Callable[[str], None]) -> bool:
        """Return whether there are samples enough for an answer of a device; tells if not."""
        few = self._samples < LEAST_SAMPLES
        if few:
            tell(f"it goes on without {self._folder}: {self._samples} samples; a device has {LEAST_SAMPLES}")
        return not few

    def train(self, number: int, seed: int, state: Vector, bounds: UpdateBounds) -> Update:
        """Return the head of the update of a round. Raises LocalError for one that would be refused."""
        request = Work(number, seed, number, (((0, self._samples),),))
        update = self._trainer.run(request, state)
        if fault := bounds.refusal(request, update):
            raise LocalError(f"{self.name} ({self._folder}): update refused: {fault}")
        self._values[:] = self._parameters.sums
        return update

    def score(self, number: int, state: Vector) -> Sums:
        """Return the sums and counts of the metrics on the samples that are held out."""
        return self._trainer.run(Work(number, 0, number, (), held_out=True), state).metrics

    def fetch(self, _stop: int, _deadline: Deadline) -> None:
        self._next = 0

    def read(self, out: Vector, _deadline: Deadline) -> None:
        out[:] = self._values[self._next : self._next + len(out)]
        self._next += len(out)


def _scored(number: int, state: Vector, devices: Sequence[_Device], task: Task) -> dict[str, float]:
    """Return the figures of a round's state on the samples that devices hold out."""
    sums = Sums()
    for device in devices:
        add(sums, device.score(number, state))
    return task.summary(sums)


def _round(
    number: int,
    seed: int,
    state: Vector,
    devices: Sequence[_Device],
    reduction: Reduction,
    bounds: UpdateBounds,
) -> tuple[float, float]:
    """Combine the updates of a round. Returns the mean training loss, and the mean of local steps. Raises
    LocalError for an update that would be refused.
    """
    updates = [
        device.train(number, seeds.derive(seed, str(device.rank), number), state, bounds)
        for device in devices
    ]
    pairs = zip(devices, updates, strict=True)
    addends = [Addend(device, u.weight, u.largest, u.norm, shift=u.shift) for device, u in pairs]
    for lost in reduction.run(addends):
        raise LocalError(str(lost.error))
    losses = [update.metrics[LOSS] for update in updates]
    weight = sum(update.weight for update in updates)
    steps = sum(update.weight * update.local_steps for update in updates) / weight
    return sum(loss for loss, _ in losses) / sum(count for _, count in losses), steps
