# SPDX-License-Identifier: Apache-2.0
"""A script whose steps are split by the speeds of its workers: the same on one machine and on a fleet.

    python balanced.py
    torchrun --nproc-per-node 2 balanced.py
    millpond launch -- balanced.py

The changes for ``millpond.train.group`` are marked. The data is synthetic, the same on each worker, from a
seed.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import millpond.train


def synthetic(count: int, seed: int) -> TensorDataset:
    """Make images [count, 64] of ten kinds, and the kind of each."""
    kinds = torch.rand(10, 64, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=source)
    return TensorDataset(kinds[labels] + 0.3 * torch.randn(count, 64, generator=source), labels)


def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Return the share of the samples that the model classifies right."""
    images, labels = dataset.tensors
    model.eval()
    with torch.no_grad():
        right = model(images).argmax(1) == labels
    model.train()
    return right.float().mean().item()


def main() -> None:
    """Train, and print the accuracy and each rank's share of the samples."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs

    torch.set_num_threads(1)
    torch.manual_seed(1)
    dataset, test = synthetic(4000, 1), synthetic(1000, 2)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with millpond.train.group(model) as group:  # instead of a process group and DistributedDataParallel
        for _ in range(epochs):
            for images, labels in group.loader(dataset):  # instead of a sampler and a DataLoader
                optimizer.zero_grad()
                group.step(cross_entropy(model(images), labels, reduction="sum"))  # instead of backward
                optimizer.step()
        if group.rank == 0:
            print(f"accuracy {accuracy(model, test):.3f}")
            for rank, samples in enumerate(group.samples):
                print(f"rank {rank}: {samples / sum(group.samples):.1%} of the samples")


if __name__ == "__main__":
    main()
