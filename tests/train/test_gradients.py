# SPDX-License-Identifier: Apache-2.0
"""Uneven shares of a batch, summed and applied by the server, equal one process with the whole batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from millpond.train.data.samples import DataError, Samples
from millpond.train.protocol import Compute
from millpond.train.reduce.ordered import OrderedSum
from millpond.train.state import flat
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.sync.gradients import GradientWorker, ServerOptimizer

SAMPLES = 64
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


def samples() -> Samples:
    rng = np.random.default_rng(3)
    return Samples(rng.normal(size=(SAMPLES, 1, 2, 4)).astype(np.float32), rng.integers(0, 4, SAMPLES))


def optimizer_of(model: nn.Module, adam: bool) -> torch.optim.Optimizer:
    free = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(free, lr=0.01) if adam else torch.optim.SGD(free, lr=0.1, momentum=0.9)


class Group:
    """Workers with all samples each, and a server, without what lies between them."""

    def __init__(self, make: type[nn.Module] | object, workers: int, *, adam: bool = False) -> None:
        assert callable(make)
        self.workers = [GradientWorker(FlatParameters(make()), [samples()]) for _ in range(workers)]
        self.model = make()
        self.server = ServerOptimizer(FlatParameters(self.model), optimizer_of(self.model, adam))

    def step(self, number: int, shares: list[list[int]]) -> None:
        total = OrderedSum(self.server.parameters.sums)
        for worker, share in zip(self.workers, shares, strict=False):
            worker.parameters.state[:] = self.server.parameters.state
            computed = worker.compute(Compute(number, number, (tuple(share),)))
            total.announce(worker)
            total.add(worker, worker.parameters.sums, computed.samples)
        total.divide()
        self.server.apply(1.0)


def alone(make: type[nn.Module] | object, batches: list[list[int]], *, adam: bool = False) -> nn.Module:
    assert callable(make)
    model, data = make(), samples()
    optimizer = optimizer_of(model, adam)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(
            model(torch.from_numpy(data.images[batch])), torch.from_numpy(data.labels[batch])
        ).backward()
        optimizer.step()
    return model


def vector(model: nn.Module) -> np.ndarray:
    out = np.empty(sum(value.numel() for value in model.state_dict().values()), np.float32)
    flat.read(model, out)
    return out


def batches(steps: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.permutation(SAMPLES)[:16].tolist() for _ in range(steps)]


def cut(batch: list[int], split: tuple[int, ...]) -> list[list[int]]:
    ends = np.cumsum((0, *split)).tolist()
    return [batch[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("make", [plain, tied])
def test_uneven_shares_are_one_big_batch(make: object, adam: bool) -> None:
    group = Group(make, 3, adam=adam)
    for number, batch in enumerate(batches(40)):
        group.step(number, cut(batch, SPLITS[number % len(SPLITS)]))
    one = alone(make, batches(40), adam=adam)
    difference = np.abs(group.server.parameters.state - vector(one)).max()
    assert difference <= 1e-6
    assert np.abs(group.server.parameters.state - vector(make())).max() > 0.1  # it has learned


def test_the_same_steps_have_the_same_bits() -> None:
    states = []
    for _ in range(2):
        group = Group(plain, 3)
        for number, batch in enumerate(batches(10)):
            group.step(number, cut(batch, SPLITS[number % 3]))
        states.append(group.server.parameters.state.tobytes())
    assert states[0] == states[1]


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
        model(torch.from_numpy(samples().images[share]))
        moved.append(model[1].running_mean * len(share))
    assert torch.allclose(norm.running_mean, sum(moved) / 16, atol=1e-6)
    assert int(norm.num_batches_tracked) == 1
    assert not torch.allclose(norm.running_var, alone(normed, [batch])[1].running_var, atol=1e-6)


def test_frozen_values_stay_bit_by_bit() -> None:
    group, before = Group(tied, 3), tied()
    for number, batch in enumerate(batches(20)):
        group.step(number, cut(batch, (7, 7, 2)))
    assert torch.equal(group.model.frozen, before.frozen)
    assert torch.equal(group.model.constant, before.constant)
    assert torch.equal(group.model.inward.weight, group.model.again.weight)


def test_gradients_that_were_set_to_none_are_found() -> None:
    group = Group(plain, 1)
    worker = group.workers[0]
    worker.compute(Compute(1, 1, (tuple(range(8)),)))
    whole = worker.parameters.sums.copy()
    worker.parameters.clear()
    for parameter in worker.parameters.model.parameters():
        parameter.grad = None
    images, labels = samples().images[:8], samples().labels[:8]
    cross_entropy(
        worker.parameters.model(torch.from_numpy(images)), torch.from_numpy(labels), reduction="sum"
    ).backward()
    worker.parameters.gather(8)
    assert np.array_equal(worker.parameters.sums, whole)


@pytest.mark.parametrize("adam", [False, True])
def test_a_keeper_goes_on_from_what_another_remembered(adam: bool) -> None:
    first, whole = Group(plain, 2, adam=adam), Group(plain, 2, adam=adam)
    for number, batch in enumerate(batches(12)):
        whole.step(number, cut(batch, (10, 6)))
        if number < 6:
            first.step(number, cut(batch, (10, 6)))
    second = Group(plain, 2, adam=adam)
    second.server.parameters.state[:] = first.server.parameters.state
    second.server.restore(*first.server.momentum())
    for number, batch in enumerate(batches(12)[6:], 6):
        second.step(number, cut(batch, (10, 6)))
    assert np.array_equal(second.server.parameters.state, whole.server.parameters.state)


@pytest.mark.parametrize("wanted", [((64,),), ((-1,),), ((),), ((1,), (1,))])
def test_samples_that_are_not_there_are_refused(wanted: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(DataError):
        GradientWorker(FlatParameters(plain()), [samples()]).compute(Compute(1, 1, wanted))


def test_a_double_model_is_refused() -> None:
    with pytest.raises(Exception, match=r"call \.float\(\)"):
        FlatParameters(nn.Linear(2, 2).double())
