# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the parameter server's optimizer, which applies means of gradients or differences, the
latter as a strategy says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from millpond.base.errors import LocalError
from millpond.train.job.spec import OptimizerSpec, WorkSpec
from millpond.train.local.optimizers import Schedule, has_modes, make_optimizer, set_mode, trainable
from millpond.train.state import optimizer_state
from millpond.train.state.flat import Vector
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.state.layout import Tensor as Entry
from millpond.train.strategies.strategy import Strategy
from millpond.train.task.task import Task


class StrategyOptimizer(torch.optim.Optimizer):
    """Has ``strategy`` make the steps of ``parameters``. Its learning rate scales the mean."""

    def __init__(self, strategy: Strategy, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self._strategy = strategy

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        """See torch. Raises LocalError for state that a checkpoint could not hold, and any exception of the
        user's code.
        """
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    mean = parameter.grad if group["lr"] == 1 else parameter.grad * group["lr"]
                    kept = self.state[parameter]
                    self._strategy.step(parameter.data, mean, kept)
                    _check_kept(kept)


def _check_kept(kept: Mapping[str, Any]) -> None:
    for name, value in kept.items():
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            found = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise LocalError(f"federated: strategy: keeps '{name}', a {found}; keep float32 tensors alone")


def optimizer_of(strategy: Strategy, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a strategy. Raises LocalError."""
    table = dict(strategy.torch_optimizer)
    if not table:
        return StrategyOptimizer(strategy, trainable(model))
    spec = OptimizerSpec(table.pop("name"), table.pop("learning_rate", None), table)
    return make_optimizer(model, spec, where="federated: strategy")


class ServerOptimizer:
    """Applies means of gradients or differences to the model of ``parameters`` with a torch optimizer, as one
    process with all samples would: at the rates of ``schedule``, gradients scaled down to the L2 norm
    ``clip_norm``. With ``differences``, the means are of those.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        differences: bool = False,
    ) -> None:
        self.parameters, self._differences = parameters, differences
        self._optimizer = optimizer
        self._schedule, self._clip_norm = schedule, clip_norm
        set_mode(optimizer, training=True)
        self._first = optimizer_state.groups_of(optimizer)

    def apply(self, factor: float, epoch: int = 1, unused: Collection[int] = (), share: float = 0.0) -> None:
        """Make one step of round or epoch ``epoch``, of whose samples a ``share`` is used, with the mean in
        ``parameters.sums``, at ``factor`` times the optimizer's own learning rates. The new state is then
        in ``parameters.state``. As in one process, ``unused`` parameters have no gradient: momentum and
        weight decay leave them alone.
        """
        self.parameters.take_mean(unused)
        if self._differences and not isinstance(self._optimizer, StrategyOptimizer):
            self._leave_unchanged()
        groups = self._optimizer.param_groups
        if self._clip_norm is not None:
            trained = [parameter for group in groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, self._clip_norm)
        if self._schedule:
            self._schedule.set(self._optimizer, epoch, share)
        own = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        self._optimizer.step()
        for parameter in (parameter for group in groups for parameter in group["params"]):
            parameter.grad = None  # a view of the mean
        self._optimizer.zero_grad()  # for what an optimizer of the user's clears there
        for group, rate in zip(groups, own, strict=True):
            group["lr"] = rate
        self.parameters.complete()

    def _leave_unchanged(self) -> None:
        """Remove the gradients of what no device has changed, so that weight decay leaves that alone."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.grad.any():
                    parameter.grad = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Vector]:
        """Give the model the values that are to be used, inside the context: some optimizers train others.
        Yields them; ``parameters.state``, which workers may read, stays as it is.
        """
        state = self.parameters.state
        if not has_modes(self._optimizer):
            yield state
            return
        self.parameters.bind(state.copy())
        set_mode(self._optimizer, training=False)
        try:
            self.parameters.complete()
            yield self.parameters.state
        finally:
            set_mode(self._optimizer, training=True)
            self.parameters.bind(state)

    def momentum(self) -> tuple[tuple[Entry, ...], Vector]:
        """Return what the optimizer keeps: its tensors, named ``parameter.name``, its figures, and the values
        of both as float32 [size]. Raises LocalError for what a checkpoint does not hold.
        """
        return optimizer_state.read(self._optimizer, self._first)

    def restore(self, entries: tuple[Entry, ...], values: Vector) -> None:
        """Take back what an optimizer has kept. Raises LocalError for that of another one."""
        self.parameters.loaded()
        optimizer_state.write(self._optimizer, entries, values)


def server_optimizer_of(
    parameters: FlatParameters, work: WorkSpec, strategy: Strategy, task: Task
) -> ServerOptimizer:
    """Return what a job's parameter server applies: differences as ``strategy`` says where workers train
    locally, by schedule and bound of their own; else gradients, by the job's. Raises LocalError.
    """
    if work.passes:
        return ServerOptimizer(parameters, optimizer_of(strategy, parameters.model), differences=True)
    optimizer = make_optimizer(parameters.model, work.optimizer, task)
    schedule = Schedule(optimizer, work.scheduler, work.total, task)
    return ServerOptimizer(parameters, optimizer, schedule=schedule, clip_norm=work.clip_norm)
