# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the accuracy of a small network by batch and learning rate, in the place of ImageNet's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from bench.experiment import Run
from millpond.host.emulation.demo import data
from millpond.train.job.spec import OptimizerSpec, SchedulerSpec
from millpond.train.local.optimizers import Schedule, make_optimizer
from millpond.train.zoo.models import digits_cnn

POLYNOMIAL = SchedulerSpec("PolynomialLR", {"total_iters": "total", "power": 0.5}, "step")
"""The rate of GoogLeNet (section 7.3)."""
STEPS = SchedulerSpec("MultiStepLR", {"milestones": [20, 36], "gamma": 0.1})
"""The rate of Network in Network (section 7.2): a tenth, twice; the epochs are not printed."""
_QUICK = 8


@dataclass(frozen=True, slots=True)
class Training:
    """Training with SGD and the paper's momentum of 0.9."""

    batch: int
    rate: float
    epochs: int
    scheduler: SchedulerSpec


def accuracies(training: Training, run: Run) -> list[float]:
    """Return the accuracy in per cent after training, for each seed."""
    epochs = training.epochs // _QUICK if run.quick else training.epochs
    torch.set_num_threads(1)  # steps are too small for more
    found = [_accuracy(training, epochs, seed) for seed in range(run.repeats)]
    run.say(f"batch {training.batch}, rate {training.rate}: {', '.join(f'{each:.1f}' for each in found)} %")
    return found


def _accuracy(training: Training, epochs: int, seed: int) -> float:
    torch.manual_seed(seed)
    samples = data.load()
    order = torch.randperm(len(samples.labels))
    every, digits = (
        torch.from_numpy(samples.images)[order, None] / 255,
        torch.from_numpy(samples.labels)[order],
    )
    images, labels = every[data.TEST :], digits[data.TEST :]
    model = digits_cnn()
    optimizer = make_optimizer(model, OptimizerSpec("sgd", training.rate, {"momentum": 0.9}))
    schedule = Schedule(optimizer, training.scheduler, epochs)
    for epoch in range(1, epochs + 1):
        order = torch.randperm(len(images))
        for start in range(0, len(images), training.batch):
            schedule.set(optimizer, epoch, start / len(images))
            chosen = order[start : start + training.batch]
            loss = cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        right = model(every[: data.TEST]).argmax(1) == digits[: data.TEST]
    return 100 * float(right.float().mean())
