# SPDX-License-Identifier: Apache-2.0
"""The trial of a job on the host: what workers cannot do fails there; what they can do passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.rnn import pack_padded_sequence

from millpond.base.errors import LocalError
from millpond.train.job.spec import LocalRule, ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.strategies import Strategy
from millpond.train.strategies.fedavg import FedAvg
from millpond.train.strategies.fedprox import FedProx
from millpond.train.task.task import Task
from millpond.train.worker.trial import try_out

SGD = OptimizerSpec("sgd", 0.1, {"momentum": 0.9})
STEPS = WorkSpec("trial", ModelSpec("none:none"), optimizer=SGD, total=3)
ROUNDS = replace(STEPS, passes=3, batch=16)
LOCAL_STEPS = replace(STEPS, passes=1, steps=4)
ALL = pytest.mark.parametrize("work", [STEPS, ROUNDS, LOCAL_STEPS])


def samples(count: int = 64) -> list[Any]:
    torch.manual_seed(1)
    return [(row, int(row[0] > 0)) for row in torch.randn(count, 8)]


class Points:
    """A task of two classes of points."""

    def model(self) -> nn.Module:
        return nn.Linear(8, 2)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def tried(
    task: Any, work: WorkSpec = ROUNDS, part: Any = None, strategy: Strategy | None = None, local: Any = ()
) -> None:
    own = Task(task)
    try_out(own, own.model(), work, strategy or FedAvg(), part or samples(), local)


@ALL
@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.1}, {"accumulate": 3}, {"precision": "bfloat16"}])
def test_a_task_that_can_be_trained_passes(work: WorkSpec, more: dict[str, Any]) -> None:
    tried(Points(), replace(work, **more))


RULES = (LocalRule(0.1), LocalRule(inner_rate=0.1), LocalRule(alpha=0.5), LocalRule(normalized=True))


@pytest.mark.parametrize("rule", RULES)
def test_so_does_each_rule_of_local_training(rule: LocalRule) -> None:
    class Own(FedAvg):
        local = rule

    tried(Points(), strategy=Own())


class Unlabelled(Points):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        labels = batch[1]
        return cross_entropy(model(batch[0]), labels, ignore_index=-100, reduction="sum"), int(
            (labels != -100).sum()
        )


@ALL
def test_the_first_samples_may_have_no_label(work: WorkSpec) -> None:
    rows = [(row, -100 if place < 40 else label) for place, (row, label) in enumerate(samples())]
    tried(Unlabelled(), work, rows)
    with pytest.raises(LocalError, match=r"the task's loss is .* over a count of 0"):
        tried(Unlabelled(), work, [(row, -100) for row, _ in rows])


class Normed(Points):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))


@ALL
def test_one_sample_is_enough_also_of_a_batch_norm(work: WorkSpec) -> None:
    tried(Normed(), work, samples(1))
    tried(Normed(), work)


class Sequences(Points):
    """Tells the lengths of sequences, which are never 0."""

    def model(self) -> nn.Module:
        return nn.GRU(1, 2, batch_first=True)

    def collate(self, found: Any) -> Any:
        rows, labels = zip(*found, strict=True)
        return torch.stack(rows), torch.tensor([len(row) for row in rows]), torch.tensor(labels)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        rows, lengths, labels = batch
        packed = pack_padded_sequence(rows[..., None], lengths, batch_first=True)
        return cross_entropy(model(packed)[1][0], labels, reduction="sum"), len(labels)


class Graphs(Points):
    """Joins the two nodes of each sample."""

    def collate(self, found: Any) -> Any:
        rows, labels = zip(*found, strict=True)
        return torch.cat([row.expand(2, -1) for row in rows]), torch.tensor(labels)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return cross_entropy(model(batch[0]).view(-1, 2, 2).mean(1), batch[1], reduction="sum"), len(batch[1])


class Words(Points):
    """Has an embedding with sparse gradients, or one that bounds its weights itself."""

    def __init__(self, **how: Any) -> None:
        self._how = how

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(2, 8, **self._how), nn.Linear(8, 2))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return super().loss(model, ((batch[0][:, 0] > 0).long(), batch[1]))


class Contrasting(Points):
    """A loss of pairs within the batch."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        found = normalize(model(batch[0]))
        near = (found @ found.T / 0.1).fill_diagonal_(-1e9)
        return cross_entropy(near, torch.arange(len(found)).roll(1), reduction="sum"), len(found)


@ALL
@pytest.mark.parametrize("task", [Sequences(), Graphs(), Words(sparse=True), Contrasting()])
def test_unusual_batches_losses_and_gradients_pass(task: Any, work: WorkSpec) -> None:
    tried(task, work)
    tried(task, replace(work, clip_norm=0.1, accumulate=2))
    if work.passes:
        tried(task, work, strategy=FedProx(0.1))


def test_what_torch_refuses_is_refused_in_its_words() -> None:
    adam = replace(ROUNDS, optimizer=OptimizerSpec("adamw", 0.1))
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        tried(Words(sparse=True), adam)
    with pytest.raises(LocalError, match=r"the model's forward changes its parameter '0\.weight'"):
        tried(Words(max_norm=0.01), STEPS)
    tried(Words(max_norm=0.01), ROUNDS)  # as in a loop of torch's


@ALL
def test_an_optimizer_that_needs_more_than_gradients_is_refused(work: WorkSpec) -> None:
    class Again(torch.optim.SGD):
        def step(self, closure: Any) -> None:  # type: ignore[override]
            closure()

    class Own(Points):
        def optimizer(self, parameters: Any) -> Any:
            return Again(parameters, 0.1)

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'closure'"):
        tried(Own(), replace(work, optimizer=OptimizerSpec()))


@ALL
@pytest.mark.parametrize("task", [Points, Normed])
def test_a_mean_in_place_of_a_sum_is_refused(task: Any, work: WorkSpec) -> None:
    class Mean(task):  # type: ignore[misc]
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
            return cross_entropy(model(batch[0]), batch[1]), len(batch[1])

    with pytest.raises(LocalError, match=r"it must return the sum of the losses, not their mean"):
        tried(Mean(), work)


def test_a_strategy_that_fails_does_so_before_a_device_is_asked() -> None:
    class Failing(FedAvg):
        def step(self, parameter: Tensor, mean: Tensor, kept: Any) -> None:
            raise KeyError("momentum")

    with pytest.raises(KeyError, match="momentum"):
        tried(Points(), strategy=Failing())


def test_layers_of_the_worker_are_its_own() -> None:
    class Two(Points):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))

    tried(Two(), local=frozenset({"1.weight", "1.bias"}))
