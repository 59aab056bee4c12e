# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): a small network that is trained plainly, or on mini-epochs that a rule repeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import millpond.data
from millpond.data.tier.mini_epochs import MiniEpoch
from millpond.train.repeats import FixedRepeats, RepeatRule

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Split:
    """Samples to train on, to test with, and to score repetitions by."""

    train: Batch
    test: Batch
    held: Batch


@dataclass(frozen=True, slots=True)
class Setting:
    """The training: ``visits`` of each sample, in batches of ``batch``, at the rate ``rate`` with a momentum
    of 0.9. A repetition is scored by its loss on held-out samples; if ``weighed`` by the training loss and
    the errors of training and of held-out samples, from which the rule makes its score.
    """

    visits: int = 64
    batch: int = 32
    rate: float = 0.05
    weighed: bool = False


def digits(seed: int, *, in_order: bool = False, samples: int = 0) -> Split:
    """Return scikit-learn's digits, of which a fifth tests; or ``samples`` train, and all others test."""
    found = load_digits()
    return _split(found.data.astype(np.float32) / 16, found.target, seed, in_order=in_order, samples=samples)


def synthetic(seed: int, *, in_order: bool = False, samples: int = 0) -> Split:
    """Return 3,000 samples of ten overlapping normal distributions in 32 dimensions, as ``digits``."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(10, 32))
    labels = rng.integers(0, 10, 3000)
    inputs = (centres[labels] + 1.3 * rng.normal(size=(3000, 32))).astype(np.float32)
    return _split(inputs, labels, seed, in_order=in_order, samples=samples)


def _split(inputs: np.ndarray, labels: np.ndarray, seed: int, *, in_order: bool, samples: int) -> Split:
    order = np.random.default_rng(seed).permutation(len(labels))
    count = samples or len(order) - len(order) // 5
    train, test = order[:count], order[count:]
    held = order[:: max(len(order) // 150, 1)] if not samples else test[:150]
    test = test if not samples else test[150:]
    train = train[np.argsort(labels[train], kind="stable")] if in_order else train
    x, y = torch.from_numpy(inputs), torch.from_numpy(labels)
    return Split((x[train], y[train]), (x[test], y[test]), (x[held], y[held]))


def plain(split: Split, seed: int, setting: Setting) -> Iterator[Batch]:
    """Yield the batches of plain training: each epoch in another order."""
    rng, (inputs, labels) = torch.Generator().manual_seed(seed), split.train
    for _ in range(setting.visits):
        for batch in torch.split(torch.randperm(len(labels), generator=rng), setting.batch):
            yield inputs[batch], labels[batch]


def trained(split: Split, seed: int, setting: Setting, batches: Iterator[Batch]) -> float:
    """Return the accuracy on the test samples after training on ``batches``."""
    model = _Model(split, seed, setting)
    for batch in batches:
        model.step(batch)
    return 1 - model.rated(split.test)[1]


def repeated(
    split: Split, seed: int, setting: Setting, parts: int, rule: RepeatRule
) -> tuple[float, list[int]]:
    """Train on ``parts`` mini-epochs of each pass, as often as ``rule`` says, until each sample has had its
    visits on average. Returns the accuracy on the test samples, and how often mini-epochs were repeated.
    """
    model, count = _Model(split, seed, setting), len(split.train[1])
    rng, visits = torch.Generator().manual_seed(seed), 0
    with millpond.data.mini_epochs(
        TensorDataset(*split.train), size=-(-count // parts), repeat=rule, passes=setting.visits, seed=seed
    ) as mini_epochs:
        for mini_epoch in mini_epochs:
            if mini_epoch.repeat == 1:
                inputs, labels = _samples(mini_epoch)
            losses = [
                model.step((inputs[batch], labels[batch]))
                for batch in torch.split(torch.randperm(len(labels), generator=rng), setting.batch)
            ]
            if not isinstance(rule, FixedRepeats):
                mini_epochs.report(*model.scored(split, (inputs, labels), losses))
            visits += len(labels)
            if visits >= setting.visits * count:
                break
        return 1 - model.rated(split.test)[1], mini_epochs.repeats


def _samples(mini_epoch: MiniEpoch) -> Batch:
    inputs, labels = zip(*(mini_epoch[index] for index in range(len(mini_epoch))), strict=True)
    return torch.stack(inputs), torch.stack(labels)


class _Model:
    """A network of one hidden layer, and its optimizer."""

    def __init__(self, split: Split, seed: int, setting: Setting) -> None:
        torch.set_num_threads(1)  # the model is small: more would wait for each other
        torch.manual_seed(seed)
        self._net = nn.Sequential(nn.Linear(split.train[0].shape[1], 64), nn.ReLU(), nn.Linear(64, 10))
        self._optimizer = torch.optim.SGD(self._net.parameters(), setting.rate, momentum=0.9)
        self._weighed = setting.weighed

    def step(self, batch: Batch) -> float:
        """Take a step. Returns the loss of the batch."""
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._net(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()

    @torch.no_grad()
    def rated(self, samples: Batch) -> tuple[float, float]:
        """Return the loss and the error on some samples."""
        found = self._net(samples[0])
        loss = nn.functional.cross_entropy(found, samples[1])
        return float(loss), float((found.argmax(1) != samples[1]).double().mean())

    def scored(
        self, split: Split, mini_epoch: Batch, losses: list[float]
    ) -> tuple[float, float | None, float | None]:
        """Return what is reported of a repetition."""
        loss, error = self.rated(split.held)
        if not self._weighed:
            return loss, None, None
        return sum(losses) / len(losses), self.rated(mini_epoch)[1], error
