# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the metrics of a model on held-out samples, as sums and counts."""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

import numpy as np
import torch
from torch import nn

from millpond.train.balance.curve import Ints
from millpond.train.job.spec import WorkSpec
from millpond.train.local.accelerator import device_of, moved
from millpond.train.local.prefetch import prefetched
from millpond.train.task.sums import Sums, add
from millpond.train.task.task import Batch, Task

_BATCH = 256


class Samples(Sized, Protocol):
    """Samples that are read in batches."""

    def threads(self, most: int) -> int:
        """Return how many threads may read at once, of ``most``."""

    def batch(self, places: Ints) -> Batch:
        """Return the batch of the samples at some places."""


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, samples: Samples, work: WorkSpec) -> Sums:
    """Return the sums and counts of the task's metrics over the samples, in batches of at most that of
    training, or _BATCH.
    """
    model.eval()
    size = min(_BATCH, work.batch or _BATCH)
    places = [np.arange(start, min(start + size, len(samples))) for start in range(0, len(samples), size)]
    sums, device = Sums(), device_of(model)
    for _, batch in prefetched(places, samples.batch, work.prefetch, samples.threads(work.prefetch)):
        with autocast(work, device):
            add(sums, task.metrics(model, moved(batch, device)))
    return sums


def autocast(work: WorkSpec, device: torch.device) -> torch.autocast:
    """Return the context in which a job's model computes on a device."""
    return torch.autocast(device.type, torch.bfloat16, enabled=work.precision == "bfloat16")
