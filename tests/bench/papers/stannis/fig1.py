# SPDX-License-Identifier: Apache-2.0
"""Edge (processor time): Fig. 1: the speed of MobileNetV2 by the batch, trained on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from bench.balance.paper import HOST_BATCH, NODE_SPEED
from bench.experiment import Line, Panel, Run
from bench.papers.exhibit import Exhibit, Shown, Value, computed, measured
from millpond.train.balance.curve import Curve
from millpond.train.zoo.models import mobilenet_v2

SIDE, BATCHES = 96, (2, 5, 10, 20, 40, 60, 100, HOST_BATCH)
QUICK_SIDE, QUICK_BATCHES = 32, (2, 8, 16)
_CLASSES = 1000


def seconds_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, side: int) -> float:
    """Return the processor time in seconds of one training step of random images."""
    images, labels = torch.rand(batch, 3, side, side), torch.randint(_CLASSES, (batch,))
    began = time.process_time()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    torch.autograd.backward(loss)
    optimizer.step()
    return time.process_time() - began


def measure(run: Run) -> Shown:
    """Train some steps with each batch, all batches in each repeat."""
    side, batches = (QUICK_SIDE, QUICK_BATCHES) if run.quick else (SIDE, BATCHES)
    torch.set_num_threads(1)
    model = mobilenet_v2(_CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    found: dict[int, list[float]] = {batch: [] for batch in batches}
    seconds_of(model, optimizer, batches[0], side)
    for repeat in range(run.repeats):
        run.say(f"Fig. 1: repeat {repeat + 1} of {run.repeats}")
        for batch in batches:
            found[batch].append(seconds_of(model, optimizer, batch, side))
    curve = Curve.fit((batch, seconds) for batch, all_of_it in found.items() for seconds in all_of_it)
    return Shown(
        (*(_row(batch, seconds) for batch, seconds in found.items()), _best(curve)),
        f"nothing; one thread trains on random images of {side} x {side} pixels; its processor time counts",
        "The paper prints Fig. 1 without numbers. Its best batch, 180, is in section V-A, and its speed with "
        "that is a third of the 93.4 img/s of three nodes of 8 cores. On this machine large batches are "
        "slower again.",
        (_panel(found, side),),
    )


def _row(batch: int, seconds: Sequence[float]) -> Value:
    paper = round(NODE_SPEED, 1) if batch == HOST_BATCH else None
    return measured(f"batch {batch}", "img/s", paper, [batch / second for second in seconds])


def _best(curve: Curve) -> Value:
    what = "best batch (ours: the smallest measured one with 0.99 of the greatest speed)"
    return computed(what, "", HOST_BATCH, curve.peak)


def _panel(found: dict[int, list[float]], side: int) -> Panel:
    speeds = [batch / sorted(seconds)[len(seconds) // 2] for batch, seconds in found.items()]
    lines = (
        Line("millpond", f"{side} x {side} pixels, one thread here", list(found), speeds),
        Line("paper", "the paper's best batch", [HOST_BATCH], [NODE_SPEED], marks=True),
    )
    return Panel("Fig. 1: MobileNetV2", "batch size", "img/s", lines)


EXHIBIT = Exhibit("fig-1", "Fig. 1: Processing speed over the batch size, MobileNetV2", measure)
