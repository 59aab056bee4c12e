# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): one round of local training, and the score of a model."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from millpond.base.errors import LocalError
from millpond.train.data.samples import Samples
from millpond.train.determinism import generators
from millpond.train.job.spec import TrainingSpec

_SCORE_BATCH = 256


def train_round(model: nn.Module, samples: Samples, training: TrainingSpec, seed: int) -> tuple[float, float]:
    """Train ``model`` in place for one round. Returns the mean loss over the samples seen, and seconds.

    The same model state, samples and seed give the same bits. The optimizer is new each round: momentum that
    a worker kept would pull it away from the average.
    """
    started = time.perf_counter()
    generators.plant(seed)
    shuffle = torch.Generator().manual_seed(seed)
    images, labels = torch.from_numpy(samples.images), torch.from_numpy(samples.labels)
    optimizer = make_optimizer(model, training)
    model.train()
    total = 0.0
    for _ in range(training.epochs):
        for batch in batches(len(labels), training.batch, shuffle):
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item() * len(batch)
    return total / (training.epochs * len(labels)), time.perf_counter() - started


def batches(count: int, batch: int, shuffle: torch.Generator) -> Iterator[Tensor]:
    """Yield indices of all samples, shuffled; a last one alone joins the batch before, for BatchNorm."""
    order = torch.randperm(count, generator=shuffle)
    parts = [order[start : start + batch] for start in range(0, count, batch)]
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    yield from parts


def make_optimizer(model: nn.Module, training: TrainingSpec) -> torch.optim.Optimizer:
    """Make an optimizer of the parameters that may be trained. Raises LocalError if there are none."""
    free = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not free:
        raise LocalError("the model has no parameter that may be trained")
    if training.optimizer == "adam":
        return torch.optim.Adam(free, lr=training.learning_rate)
    return torch.optim.SGD(free, lr=training.learning_rate, momentum=training.momentum)


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples) -> tuple[float, float]:
    """Return the share of the samples (at least one) classified right, and the mean loss."""
    model.eval()
    images, labels = torch.from_numpy(samples.images), torch.from_numpy(samples.labels)
    right, total = 0, 0.0
    for start in range(0, len(labels), _SCORE_BATCH):
        x, y = images[start : start + _SCORE_BATCH], labels[start : start + _SCORE_BATCH]
        logits = model(x)
        right += int((logits.argmax(1) == y).sum())
        total += cross_entropy(logits, y, reduction="sum").item()
    return right / len(labels), total / len(labels)
