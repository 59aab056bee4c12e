# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the score of a model on held-out samples."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from millpond.train.data.samples import Samples

_BATCH = 256


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples) -> tuple[float, float]:
    """Return the share of the samples (at least one) classified right, and the mean loss."""
    model.eval()
    images, labels = torch.from_numpy(samples.images), torch.from_numpy(samples.labels)
    right, total = 0, 0.0
    for start in range(0, len(labels), _BATCH):
        x, y = images[start : start + _BATCH], labels[start : start + _BATCH]
        logits = model(x)
        right += int((logits.argmax(1) == y).sum())
        total += cross_entropy(logits, y, reduction="sum").item()
    return right / len(labels), total / len(labels)
