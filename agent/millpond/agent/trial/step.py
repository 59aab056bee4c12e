# SPDX-License-Identifier: Apache-2.0
"""Entry: a step of training in a worker's sandbox, of a model of its own: ``main`` of a fork of the zygote.

A device runs it to learn whether its workers could train, before a new version of its software is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_SAMPLES, _CLASSES, _STEPS = 32, 4, 20


def main(arguments: Sequence[str]) -> int:
    """Read the file that ``arguments`` name, and train for some steps. Exit codes: 0 the loss has become
    less, 1 it has not.
    """
    import torch

    from millpond.train.worker import preloaded  # noqa: F401 - what every worker imports

    seed = int.from_bytes(Path(arguments[0]).read_bytes()[:4], "little")
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, _CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs, labels = torch.rand(_SAMPLES, 1, 8, 8), torch.arange(_SAMPLES) % _CLASSES
    losses = []
    for _ in range(_STEPS):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss))
    if not losses[-1] < losses[0]:
        print(f"training makes the loss no less: {losses[0]} {losses[-1]}", file=sys.stderr, flush=True)
        return 1
    return 0
