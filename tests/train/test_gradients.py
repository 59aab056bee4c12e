# SPDX-License-Identifier: Apache-2.0
"""Uneven shares of a batch equal one process with the whole; differences are federated averaging."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from millpond.aggregate.exact import ExactSum, scale_of
from millpond.train.balance.data_plan import order
from millpond.train.balance.ranges import Ranges
from millpond.train.data.errors import DataError
from millpond.train.data.labelled_images import LabelledImages, of_arrays
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.selection import SampleFolders
from millpond.train.local.selection import batches as in_batches
from millpond.train.protocol import Folder, Work
from millpond.train.server.server_optimizer import ServerOptimizer
from millpond.train.state import flat, layout
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.task.task import Task

SAMPLES = 64
WORK = WorkSpec("tests", ModelSpec("none:none"))
ORDER = order(SAMPLES, WORK.seed, 1, "csd0", False).tolist()
SPLITS = ((9, 5, 2), (2, 14), (12, 2, 2), (16,))


class Tied(nn.Module):
    """Has a parameter under two names, one that may not be trained, and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.inward.weight
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("constant", torch.randn(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x.flatten(1)).tanh() * self.frozen + self.constant
        logits: Tensor = self.head(self.again(x).tanh())
        return logits


def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def tied() -> nn.Module:
    torch.manual_seed(1)
    return Tied()


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 4))


class Halved(nn.Module):
    """Has weights of bfloat16, and takes float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x.flatten(1).to(self.layers[0].weight.dtype))
        return logits.float()


def halved() -> nn.Module:
    torch.manual_seed(1)
    return Halved()


class Experts(nn.Module):
    """Few samples come to the second expert, in many batches none, and none to the third one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        logits: Tensor = self.experts[0](x)
        chosen = x[:, 0] > 1.5
        return (
            logits.index_add(0, chosen.nonzero()[:, 0], self.experts[1](x[chosen]))
            if chosen.any()
            else logits
        )


def experts() -> nn.Module:
    torch.manual_seed(1)
    return Experts()


class Images:
    """A task whose hooks but the model are the default ones."""

    model = staticmethod(plain)


def samples() -> LabelledImages:
    rng = np.random.default_rng(3)
    return of_arrays(rng.normal(size=(SAMPLES, 1, 2, 4)).astype(np.float32), rng.integers(0, 4, SAMPLES))


def optimizer_of(model: nn.Module, adam: bool) -> torch.optim.Optimizer:
    free = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (
        torch.optim.AdamW(free, lr=0.01, weight_decay=0.1)
        if adam
        else torch.optim.SGD(free, lr=0.1, momentum=0.9)
    )


def trainer(model: nn.Module, work: WorkSpec = WORK) -> LocalTrainer:
    task = Task(Images())
    folders = SampleFolders(task, work.seed, [Folder("private", "csd0")], [samples()])
    return LocalTrainer(FlatParameters(model), task, folders, work)


def ranges(share: list[int]) -> Ranges:
    """Return the positions of samples in the order of the epoch."""
    return tuple((at, at + 1) for at in map(ORDER.index, share))


class Group:
    """Workers with all samples each, and a server, without what lies between them."""

    def __init__(
        self, make: type[nn.Module] | object, workers: int, *, adam: bool = False, work: WorkSpec = WORK
    ) -> None:
        assert callable(make)
        self.workers = [trainer(make(), work) for _ in range(workers)]
        self.model = make().float()  # as the parameter server's is
        optimizer = optimizer_of(self.model, adam)
        if work.passes:
            optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=1.0)
        self.server = ServerOptimizer(FlatParameters(self.model), optimizer)

    def step(self, number: int, shares: list[list[int]]) -> None:
        state, mean = self.server.parameters.state, self.server.parameters.sums
        pairs = list(zip(self.workers, shares, strict=False))
        updates = [w.run(Work(number, number, 1, (ranges(share),)), state) for w, share in pairs]
        total = ExactSum(len(mean))
        total.begin(scale_of(max(max(update.largest, update.shift) for update in updates), len(updates)))
        for worker, _ in pairs:
            total.add(worker.parameters.sums)
        total.divide(sum(update.weight for update in updates), mean)
        self.server.apply(1.0, unused=set.intersection(*(set(update.unused) for update in updates)))


def alone(make: type[nn.Module] | object, batches: list[list[int]], *, adam: bool = False) -> nn.Module:
    assert callable(make)
    model, data = make(), samples()
    optimizer = optimizer_of(model, adam)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        images, labels = data.__getitems__(batch)
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def vector(model: nn.Module) -> np.ndarray:
    out = np.empty(layout.size(flat.describe(model)), np.float32)
    flat.read(model, out)
    return out


def batches(steps: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.permutation(SAMPLES)[:16].tolist() for _ in range(steps)]


def cut(batch: list[int], split: tuple[int, ...]) -> list[list[int]]:
    ends = np.cumsum((0, *split)).tolist()
    return [batch[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("make", [plain, tied, experts])
def test_uneven_shares_are_one_big_batch(make: object, adam: bool) -> None:
    group = Group(make, 3, adam=adam)
    for number, batch in enumerate(batches(40)):
        group.step(number, cut(batch, SPLITS[number % len(SPLITS)]))
    one = alone(make, batches(40), adam=adam)
    difference = np.abs(group.server.parameters.state - vector(one)).max()
    assert difference <= 1e-6
    assert np.abs(group.server.parameters.state - vector(make())).max() > 0.1  # it has learned


def test_batch_normalization_is_over_each_workers_own_share() -> None:
    """The running statistics move by the mean, over samples, of how each share would have moved them."""
    group, batch = Group(normed, 3), batches(1)[0]
    shares = cut(batch, (9, 5, 2))
    group.step(0, shares)
    norm = group.model[1]
    moved = []
    for share in shares:
        model = normed()
        model.train()
        model(samples().__getitems__(share)[0])
        moved.append(model[1].running_mean * len(share))
    assert torch.allclose(norm.running_mean, sum(moved) / 16, atol=1e-6)
    assert int(norm.num_batches_tracked) == 1
    assert not torch.allclose(norm.running_var, alone(normed, [batch])[1].running_var, atol=1e-6)


@pytest.mark.parametrize("wanted", [(((63, 65),),), (((-1, 2),),), ((),), (((1, 2),), ((1, 2),))])
def test_samples_that_are_not_there_are_refused(wanted: tuple[Ranges, ...]) -> None:
    one = trainer(plain())
    with pytest.raises(DataError):
        one.run(Work(1, 1, 1, wanted), one.parameters.state.copy())


def averaged(make: object, shares: list[list[int]], work: WorkSpec, seed: int) -> dict[str, Tensor]:
    """Return FedAvg's new state: the average of local states, weighted by samples, of plain PyTorch."""
    assert callable(make)
    states, data = [], samples()
    for share in shares:
        model = make()
        model.train()
        shuffle = torch.Generator().manual_seed(seed)
        free = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(free, work.optimizer.learning_rate, **work.optimizer.arguments)
        for _ in range(work.passes):
            for places in in_batches(np.ones(len(share), np.int64), work.batch, work.steps, shuffle):
                images, labels = data.__getitems__(np.array(share)[places].tolist())
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        states.append({name: value.double() for name, value in model.state_dict().items()})
    total = sum(map(len, shares))
    return {
        name: torch.stack(
            [state[name] * len(share) / total for state, share in zip(states, shares, strict=True)]
        ).sum(0)
        for name in states[0]
    }


@pytest.mark.parametrize("make", [plain, tied, normed, halved])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_server_of_sgd_at_rate_1_is_federated_averaging(make: object, steps: int) -> None:
    """Running statistics and integer counters are averaged like weights; so are weights of bfloat16, into
    the server's float32.
    """
    local = OptimizerSpec("sgd", 0.1, {"momentum": 0.9})
    work = replace(
        WORK, optimizer=local, passes=1 if steps else 2, batch=0 if steps else 4, steps=max(steps, 1)
    )
    shares = cut(batches(1)[0], (9, 5, 2))
    group = Group(make, 3, work=work)
    before = vector(group.model)
    group.step(0, shares)
    expected = averaged(make, shares, work, seed=0)
    for name, value in group.model.state_dict().items():
        wanted = expected[name] if value.is_floating_point() else expected[name].round()
        assert torch.allclose(value.double(), wanted, atol=1e-6), name
    assert np.abs(vector(group.model) - before).max() > 0.01  # it has learned


@pytest.mark.parametrize(("samples", "sizes"), [(16, [4, 4, 4, 4]), (9, [3, 2, 2, 2]), (5, [3, 2])])
def test_local_steps_divide_the_samples_into_so_many_batches(samples: int, sizes: list[int]) -> None:
    work = replace(WORK, optimizer=OptimizerSpec("sgd", 0.1), passes=1, steps=4)
    one, seen = trainer(plain(), work), list[int]()
    one.parameters.model.register_forward_hook(lambda _module, args, _out: seen.append(len(args[0])))
    update = one.run(Work(1, 1, 1, (((0, samples),),)), one.parameters.state.copy())
    assert seen == sizes and update.samples == samples


@pytest.mark.parametrize("passes", [0, 1])
def test_parameters_of_bfloat16_take_the_state_and_frozen_ones_stay(passes: int) -> None:
    model = halved()
    model.layers[2].weight.requires_grad_(False)
    before = model.layers[2].weight.clone()
    work = replace(WORK, optimizer=OptimizerSpec("sgd", 1e-9), passes=passes, batch=8)
    one = trainer(model, work)
    state = np.full(len(one.parameters.state), 0.25, np.float32)
    assert len(state) == 16 * 8 + 16 + 4  # all but the frozen weight
    one.run(Work(1, 1, 1, (((0, 16),),)), state)
    assert (model.layers[0].weight == 0.25).all()
    assert torch.equal(model.layers[2].weight, before) and model.layers[2].weight.grad is None
    assert passes or one.parameters.sums.any()


def test_gradients_of_bfloat16_are_summed_as_they_are() -> None:
    one = trainer(halved())
    update = one.run(Work(1, 1, 1, (((0, 16),),)), one.parameters.state.copy())
    model, (images, labels) = halved(), samples().__getitems__(ORDER[:16])
    cross_entropy(model(images), labels, reduction="sum").backward()
    gradients = [p.grad.reshape(-1).float() for p in model.parameters() if p.grad is not None]
    assert np.array_equal(one.parameters.sums, torch.cat(gradients).numpy())
    assert update.largest == np.abs(one.parameters.sums).max() > 0
