# SPDX-License-Identifier: Apache-2.0
"""A rank of a group that trains on a stream, and with fixed batches on the same data in memory, too."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import millpond.data
import millpond.train
from millpond.train.data import labelled_images

EPOCHS, BATCH = 3, 24


class Slow(nn.Module):
    """Rank 1 takes longer, and less so later: batches change."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 200)
        self.seconds = seconds

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(images))
        found: torch.Tensor = self.linear(images.flatten(1))
        return found


def train(dataset: Any, policy: Any, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Slow(seconds)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    epochs: list[list[int]] = []
    batches = []
    with millpond.train.group(model, policy=policy) as group:
        for _ in range(EPOCHS):
            epochs.append([])
            for images, labels in group.loader(dataset, batch=BATCH):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels, reduction="sum")
                step = group.step(loss)
                optimizer.step()
                batches.append(step.batches)
                if step.batches[group.rank]:
                    epochs[-1] += labels.tolist()
            model.seconds /= 4
    return {"weights": model.linear.weight.double().sum().item(), "epochs": epochs, "batches": batches}


def main(where: str, folder: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    slow = 0.002 if dist.get_rank() == 1 else 0.0001
    own = labelled_images.load(Path(folder), "images", "npy")
    found = {
        "memory": train(own, "fixed", 0.0),
        "streamed": train(millpond.data.stream(f"{where}/images"), "fixed", 0.0),
        "balanced": train(millpond.data.stream(f"{where}/images", memory="100 KiB"), "balance", slow),
    }
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
