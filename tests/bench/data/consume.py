# SPDX-License-Identifier: Apache-2.0
"""Entry: a consumer of a stream whose steps take as long as they are told: what it waited, as JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import millpond.data


def trained() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a step of a network of three convolutions, as in Ember's Fig. 7, on images of 32 px in RGB."""
    from millpond.train.zoo.models import mnist_cnn

    torch.set_num_threads(1)
    model = mnist_cnn(side=32, channels=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


class Pace:
    """Steps that take as long as they should; what a sleep was too long is taken off the next one."""

    def __init__(self) -> None:
        self._debt = 0.0

    def step(self, seconds: float) -> None:
        """Sleep."""
        wanted, began = seconds - self._debt, time.monotonic()
        if wanted > 0:
            time.sleep(wanted)
        self._debt = min(time.monotonic() - began - wanted, 0.05)


def epoch(spec: dict[str, Any]) -> dict[str, float]:
    """Iterate over an epoch, or over so many of its steps."""
    step = trained() if spec.get("network") else None
    began = time.monotonic()
    stream = millpond.data.stream(
        f"{spec['address']}/{spec['name']}",
        secret=spec["secret"],
        batch=spec["batch"],
        run=spec.get("run", ""),
        chunk=spec.get("chunk"),
        memory=spec.get("memory", "64 MiB"),
    )
    pace, first, samples, last = Pace(), 0.0, 0, (0.0, 0.0)
    for steps, (images, labels) in enumerate(stream, 1):
        work = spec["step"] + len(images) * spec["each"]
        if spec.get("paced") and first:  # what was done since the last step is part of this one's time
            work -= time.monotonic() - last[0] - (stream.waited - last[1])
        if step:
            step(images, labels)
        else:
            pace.step(work)
        last = time.monotonic(), stream.waited
        first = first or time.monotonic() - began
        samples += len(images)
        if steps == spec.get("steps"):
            break
    return {
        "first": first,
        "seconds": time.monotonic() - began,
        "waited": stream.waited,
        "samples": samples,
        "chunk": stream.choice.chunk,
        "window": stream.choice.window,
        "predicted": stream.choice.idle,
    }


def in_memory(spec: dict[str, Any]) -> dict[str, float]:
    """Hold the whole data set, as a worker without streaming does, and read all of it once."""
    import numpy as np

    images = torch.from_numpy(np.load(Path(spec["folder"]) / "images.npy"))
    samples = 0
    for wanted in torch.split(torch.randperm(len(images)), spec["batch"]):
        samples += len(images[wanted].float().div_(255))
    return {"samples": samples}


def main() -> None:
    """Do one epoch for each of the cells, or hold the data set in memory."""
    spec = json.loads(sys.argv[1])
    if spec.get("in_memory"):
        results = [in_memory(spec)]
    else:
        results = [epoch(spec | cell) for cell in spec.get("cells", [{}])]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"cells": results, "peak": peak}))


if __name__ == "__main__":
    main()
