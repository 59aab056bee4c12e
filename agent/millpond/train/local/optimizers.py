# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): optimizers and schedulers, by their names in torch or of the user's task."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from millpond.base.errors import LocalError
from millpond.train import error_texts
from millpond.train.job.spec import OptimizerSpec, SchedulerSpec
from millpond.train.state import optimizer_state
from millpond.train.task.task import Task

_UNFIT = ("Optimizer", "LBFGS", "SparseAdam")
"""No optimizer, one that calls the loss again, and one for gradients that a vector cannot have."""
_NO_SCHEDULERS = (
    "ReduceLROnPlateau",
    "LambdaLR",
    "MultiplicativeLR",
    "SequentialLR",
    "ChainedScheduler",
    "SWALR",
    "_LRScheduler",
)
"""Schedulers whose arguments a job file cannot have, or whose steps need more than their number."""


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that may be trained. Raises LocalError if there are none."""
    free = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not free:
        raise LocalError(error_texts.NOT_TRAINED())
    return free


def make_optimizer(
    model: nn.Module, spec: OptimizerSpec, task: Task | None = None, where: str = "train"
) -> torch.optim.Optimizer:
    """Make an optimizer of the parameters that may be trained: the one that the job names, else that of the
    task, else SGD. Raises LocalError naming the table ``where``.
    """
    parameters = trainable(model)
    if not spec.name and task and (own := task.optimizer(parameters)) is not None:
        if isinstance(own, torch.optim.LBFGS):
            raise LocalError(
                "the task's optimizer: LBFGS calls the loss again in each step, which is not possible here"
            )
        return own
    known = {
        name.lower(): found
        for name, found in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(found, torch.optim.Optimizer) and name not in _UNFIT
    }
    make = _known(known, spec.name or "SGD", f"{where}: optimizer")
    rate = {} if spec.learning_rate is None else {"lr": spec.learning_rate}
    arguments = {**rate, **spec.arguments}
    with _told(f"{where}: optimizer", make):
        inspect.signature(make).bind(None, **arguments)
        made: torch.optim.Optimizer = make(parameters, **arguments)
    return made


def set_mode(optimizer: torch.optim.Optimizer, *, training: bool) -> None:
    """Tell an optimizer that has modes, as those without a schedule have, whether training goes on: outside
    of it the parameters have other values.
    """
    change = getattr(optimizer, "train" if training else "eval", None)
    if callable(change):
        change()


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``set_mode`` changes an optimizer."""
    return callable(getattr(optimizer, "eval", None))


class _StandIn(torch.optim.Optimizer):
    """An optimizer of any parameter groups, for a scheduler to change: classes check theirs."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change nothing."""


class Schedule:
    """Changes an optimizer's parameter groups by round or epoch as a scheduler does: learning rates, and
    whatever else.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, spec: SchedulerSpec, total: int, task: Task | None = None
    ) -> None:
        """Raises LocalError for a scheduler that is unknown or does not take its arguments."""
        # A scheduler changes its optimizer: it has one of its own, whose parameters nobody trains.
        self._first = optimizer_state.groups_of(optimizer)
        groups = [{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in copy.deepcopy(self._first)]
        total = max(total, 1)  # a job that only prepares its workers has none
        stand_in = _StandIn(groups, dict(optimizer.defaults))
        self._optimizer, self._scheduler = stand_in, _make_scheduler(stand_in, spec, total, task)
        self._changed: list[set[str]] = [set() for _ in groups]
        self._values: list[list[dict[str, Any]]] = []
        self._note()
        # Some wrong arguments fail only at the second step.
        with _told("train: scheduler", type(self._scheduler)) if spec.name else contextlib.nullcontext():
            self._go_on(min(2, total))
        self._each_step = spec.each == "step"
        if self._each_step and not hasattr(self._scheduler, "_get_closed_form_lr"):
            name = type(self._scheduler).__name__ if self._scheduler else "none"
            raise LocalError(
                f'train: scheduler: {name} has rates for whole epochs alone: leave out each = "step"'
            )

    def set(self, optimizer: torch.optim.Optimizer, epoch: int, share: float = 0.0) -> None:
        """Set what the scheduler changes for a round or epoch, from 1; for each step, if the job says so: the
        learning rates when a ``share`` of the epoch's samples is used.
        """
        if self._scheduler is None:
            return
        if self._each_step:
            self._scheduler.last_epoch = epoch - 1 + share  # type: ignore[assignment]
            rates = self._scheduler._get_closed_form_lr()  # type: ignore[attr-defined]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = float(rate)
            return
        self._go_on(epoch)
        found = self._values[max(epoch, 1) - 1]
        for group, values, changed in zip(optimizer.param_groups, found, self._changed, strict=True):
            group.update({key: values[key] for key in changed})

    def _go_on(self, epoch: int) -> None:
        if self._scheduler is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it misses the steps of the stand-in
            while len(self._values) < epoch:
                self._scheduler.step()
                self._note()

    def _note(self) -> None:
        """Note the values of this round or epoch, and which are others than at first."""
        now = optimizer_state.groups_of(self._optimizer)
        self._values.append([{**each, "lr": float(each["lr"])} for each in now])
        for values, first, changed in zip(self._values[-1], self._first, self._changed, strict=True):
            changed.update(key for key in first if not optimizer_state.is_same(values[key], first[key]))


def _make_scheduler(
    optimizer: torch.optim.Optimizer, spec: SchedulerSpec, total: int, task: Task | None
) -> lr_scheduler.LRScheduler | None:
    if not spec.name:
        own = task.scheduler(optimizer, total) if task else None
        if isinstance(own, lr_scheduler.ReduceLROnPlateau):
            raise LocalError(
                "the task's scheduler: ReduceLROnPlateau follows a score; here they follow rounds or epochs"
            )
        return own
    known = {
        name.lower(): found
        for name, found in inspect.getmembers(lr_scheduler, inspect.isclass)
        if issubclass(found, lr_scheduler.LRScheduler) and name not in (*_NO_SCHEDULERS, "LRScheduler")
    }
    make = _known(known, spec.name, "train: scheduler")
    arguments = {key: total if value == "total" else value for key, value in spec.arguments.items()}
    with _told("train: scheduler", make):
        inspect.signature(make).bind(None, **arguments)
        made: lr_scheduler.LRScheduler = make(optimizer, **arguments)
    return made


def _known(known: Mapping[str, type[Any]], name: str, what: str) -> Callable[..., Any]:
    if (found := known.get(name.lower())) is None:
        names = ", ".join(sorted(each.__name__ for each in known.values()))
        raise LocalError(f"{what}: '{name}' is not one of {names}")
    return found


@contextlib.contextmanager
def _told(what: str, make: Callable[..., Any]) -> Iterator[None]:
    """Raise LocalError for the errors of torch about arguments that it does not take."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        name = getattr(make, "__name__", what)
        raise LocalError(f"{what}: {name}: {' '.join(str(error).split())}") from None
