# SPDX-License-Identifier: Apache-2.0
"""Optimizers and schedulers of a user's own: what they keep, clear and change is as in a loop of torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from millpond.base.errors import LocalError
from millpond.train import fit
from millpond.train.job.spec import OptimizerSpec, SchedulerSpec
from millpond.train.local.optimizers import Schedule, make_optimizer
from millpond.train.server.server_optimizer import ServerOptimizer
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.state.layout import Tensor as Entry
from millpond.train.task.task import Task

from .test_optimizers import SAMPLES, User, trained


class Summing(torch.optim.SGD):
    """Adds up gradients until they are cleared, as differentially private optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter]
            kept["sum"] = parameter.grad + kept.get("sum", 0)
            parameter.grad = kept["sum"].clone()
        super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.state.clear()
        super().zero_grad(set_to_none)


class Zeroing(Summing):
    """Writes zeros into gradients."""

    def zero_grad(self, _set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


class Free(torch.optim.Optimizer):
    """Has another model to use than to train, and figures in its groups; without a schedule, so to speak."""

    def __init__(self, parameters: Any, lr: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "weights": 0.1, "training": False, "rule": (1, 2)})

    def train(self) -> None:
        self._turn(True, 0.5)

    def eval(self) -> None:
        self._turn(False, 2.0)

    @torch.no_grad()
    def _turn(self, training: bool, factor: float) -> None:
        group = self.param_groups[0]
        for parameter in group["params"] if group["training"] != training else ():
            parameter *= factor
        group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        if not group["training"]:
            raise RuntimeError("call optimizer.train() before a step")
        group["k"] += 1
        group["weights"] += 0.1
        for parameter in group["params"]:
            parameter -= group["lr"] / group["k"] * group["weights"] * parameter.grad


class Counting(torch.optim.Optimizer):
    """Keeps an int, a flag and a tensor of float64 beside its tensors."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["k"] += 1
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter]
            if not kept:
                kept.update(step=0, mean=torch.zeros_like(parameter), begun=True)
                kept["exact"] = torch.zeros((), dtype=torch.float64)
            kept["step"] += 1
            kept["exact"] += 0.1
            kept["mean"].lerp_(parameter.grad, 0.1)
            share = 1 - 0.9 ** kept["step"] + float(kept["exact"]) / 7 + self.param_groups[0]["k"]
            parameter -= self.param_groups[0]["lr"] * kept["mean"] / share


def using(kind: Any, **hooks: Any) -> User:
    return type("Own", (User,), {"optimizer": lambda _, parameters: kind(parameters, lr=0.1), **hooks})()


@pytest.mark.parametrize("kind", [Summing, Zeroing])
@pytest.mark.parametrize("work", [{"passes": 2, "batch": 5}, {"passes": 1, "steps": 3, "clip_norm": 0.1}])
def test_gradients_of_a_batch_do_not_count_in_the_next(kind: Any, work: dict[str, Any]) -> None:
    own = trained(using(kind), optimizer=OptimizerSpec(), **work)
    assert np.array_equal(own, trained(using(torch.optim.SGD), optimizer=OptimizerSpec(), **work))


@pytest.mark.parametrize("kind", [Summing, Zeroing])
def test_nor_do_those_of_a_step_of_the_parameter_server(kind: Any) -> None:
    states = []
    for each in (kind, torch.optim.SGD):
        one = server(each)
        for step in range(3):
            applied(one, step)
        states.append(one.parameters.state.copy())
    assert np.array_equal(*states)


def server(kind: Any) -> ServerOptimizer:
    model = User().model()
    return ServerOptimizer(FlatParameters(model), kind(list(model.parameters()), lr=0.1))


def applied(one: ServerOptimizer, step: int) -> bytes:
    size = len(one.parameters.state)
    one.parameters.sums[:] = np.random.default_rng(step).normal(size=size).astype(np.float32)
    one.apply(1.0)
    return one.parameters.state.tobytes()


def always(parameters: Any, lr: float) -> Free:
    made = Free(parameters, lr)
    made.param_groups[0]["training"] = True
    return made


@pytest.mark.parametrize("kind", [always, Counting, torch.optim.AdamW, torch.optim.Adafactor])
def test_one_that_resumes_comes_to_the_same_bits(kind: Any) -> None:
    one, other = server(kind), server(kind)
    for step in range(3):
        applied(one, step)
    other.parameters.state[:] = one.parameters.state
    other.restore(*one.momentum())
    assert [applied(one, step) for step in range(3, 6)] == [applied(other, step) for step in range(3, 6)]


def test_what_a_checkpoint_does_not_hold_is_named() -> None:
    class Listing(Counting):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.state[self.param_groups[0]["params"][0]]["seen"] = {object()}

    one = server(Listing)
    applied(one, 0)
    with pytest.raises(
        LocalError, match="the optimizer keeps what a checkpoint does not hold: set is neither"
    ):
        one.momentum()
    with pytest.raises(LocalError, match="the checkpoint's 'mean' is not of an optimizer"):
        one.restore((Entry("mean", (1,), "float32"),), np.zeros(1, np.float32))


def test_one_with_modes_trains_in_one_and_gives_the_model_of_the_other(tmp_path: Path) -> None:
    assert np.isfinite(trained(using(Free), optimizer=OptimizerSpec(), passes=2, batch=5)).all()
    barely = using(lambda parameters, lr: Free(parameters, 1e-6))
    assert np.abs(trained(barely, passes=1, optimizer=OptimizerSpec())).max() < 0.01  # and not halved

    class Points:
        def model(self) -> nn.Module:
            return nn.Linear(4, 2)

        def dataset(self, folder: Path, split: str) -> Any:
            return [(torch.ones(4), 0)] * 8

        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

        def optimizer(self, parameters: Any) -> Any:
            self.made = Free(parameters)
            return self.made

    task = Points()
    fit(task, tmp_path, tmp_path, epochs=2, tell=lambda _: None)
    assert task.made.param_groups[0]["training"] is False


def test_the_parameter_server_trains_one_model_and_gives_the_other() -> None:
    one, other = server(Free), server(Free)
    for step in range(4):
        state = one.parameters.state
        before = state.copy()
        with one.in_use() as used:
            assert np.array_equal(used, 2 * before) and np.array_equal(state, before)
        assert one.parameters.state is state and state.tobytes() == before.tobytes()
        assert applied(one, step) == applied(other, step)


class Decaying:
    """A scheduler of weight decay, and of a rule that no scheduler of torch knows."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._group = optimizer.param_groups[0]

    def step(self) -> None:
        self._group["weight_decay"] *= 0.5
        self._group["betas"] = (self._group["betas"][0] / 2, 0.5)
        self._group["note"] = "it has been changed"


def test_a_scheduler_may_change_whatever_a_group_has() -> None:
    task = Task(type("Own", (User,), {"scheduler": lambda _, optimizer, total: Decaying(optimizer)})())
    made = make_optimizer(User().model(), OptimizerSpec("adamw", 0.1, {"weight_decay": 0.8}))
    schedule, found = Schedule(made, SchedulerSpec(), 4, task), []
    made.param_groups[0]["foreach"] = "its own"  # what the optimizer itself changes stays
    for epoch in (1, 3, 2, 1):
        schedule.set(made, epoch)
        group = made.param_groups[0]
        found.append((group["weight_decay"], group["betas"][0], group["lr"], group["foreach"]))
    rows = [(0.8, 0.9), (0.2, 0.225), (0.4, 0.45), (0.8, 0.9)]
    assert found == [(*row, 0.1, "its own") for row in rows] and "note" not in made.param_groups[0]


def test_a_scheduler_that_follows_a_score_and_lbfgs_are_refused() -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    task = Task(type("Own", (User,), {"scheduler": lambda _, optimizer, total: plateau(optimizer)})())
    made = make_optimizer(User().model(), OptimizerSpec("sgd", 0.1))
    with pytest.raises(LocalError, match="the task's scheduler: ReduceLROnPlateau follows a score"):
        Schedule(made, SchedulerSpec(), SAMPLES, task)
    with pytest.raises(LocalError, match="the task's optimizer: LBFGS calls the loss again"):
        make_optimizer(User().model(), OptimizerSpec(), Task(using(torch.optim.LBFGS)))
