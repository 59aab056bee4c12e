# SPDX-License-Identifier: Apache-2.0
"""An ordinary DistributedDataParallel script, with nothing of millpond in it. Either of these runs it:

    torchrun --nproc-per-node 2 plain_ddp.py --epochs 3
    millpond launch -- plain_ddp.py --epochs 3

Every worker needs the same data: synthetic digits from a seed, or images.npy and labels.npy in a folder.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load(folder: Path | None, seed: int) -> TensorDataset:
    """Load images as rows of numbers from 0 to 1, and their labels."""
    if folder:
        images = np.load(folder / "images.npy").astype(np.float32)
        labels = np.load(folder / "labels.npy").astype(np.int64)
        images = images.reshape(len(images), -1) / images.max()
    else:
        source = np.random.default_rng(seed)
        labels = source.integers(0, 10, 1200)
        prototypes = source.random((10, 64), dtype=np.float32)
        images = prototypes[labels] + 0.3 * source.standard_normal((1200, 64), dtype=np.float32)
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    """Train one epoch; return the mean loss over all workers."""
    total = torch.zeros(2)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(labels), len(labels)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def digest(model: nn.Module) -> str:
    """Return a hash of all parameters, bit by bit."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    """Train, and print losses and a digest of the parameters."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="a folder with images.npy and labels.npy")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="of each worker")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    dist.init_process_group("gloo")
    data = load(options.data, options.seed)
    width = data.tensors[0].shape[1]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 10)))
    sampler = DistributedSampler(data, seed=options.seed)
    loader = DataLoader(data, batch_size=options.batch, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}")
    print(f"worker {dist.get_rank()} of {dist.get_world_size()}: parameters {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
