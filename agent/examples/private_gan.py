# SPDX-License-Identifier: Apache-2.0
"""A small GAN on handwritten digits: two models, each with its group, trained where the private digits lie.

    millpond launch --private --data private/digits --output results -- private_gan.py

On a device it reads the private folder, on the host the public one. It also runs alone, on what --root has:

    python private_gan.py --root ~/volume
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

import millpond.train

NOISE = 16


def load(root: Path) -> TensorDataset:
    """Load images [N, 64] of values from -1 to 1: this worker's own."""
    folder = root / "private" / "digits"
    if not folder.exists():
        folder = root / "public" / "digits"
    images = np.load(folder / "images.npy").astype(np.float32)
    return TensorDataset(torch.from_numpy(images.reshape(len(images), -1) / 127.5 - 1))


def models() -> tuple[nn.Module, nn.Module]:
    """Build the critic and the generator."""
    torch.manual_seed(1)
    critic = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh())
    return critic, generator


def loss(logits: Tensor, real: float) -> Tensor:
    """Return the sum of the losses of samples that shall be called real or not."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, real), reduction="sum")


def main() -> None:
    """Train, report the losses, and save the generator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("/volume"))
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    torch.set_num_threads(1)
    data, (critic, generator) = load(options.root), models()
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.5)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.05, momentum=0.5)
    with (
        millpond.train.group(critic, policy="fixed") as critics,
        millpond.train.group(generator, policy="fixed", beside=critics) as generators,
    ):
        source = torch.Generator().manual_seed(critics.rank)
        for _ in range(options.epochs):
            total = samples = 0.0
            for (images,) in critics.loader(data, private=True):
                made = generator(torch.randn(len(images), NOISE, generator=source))
                of_critic.zero_grad()
                found = loss(critic(images), 1.0) + loss(critic(made.detach()), 0.0)
                counted = critics.step(found).batches[critics.rank]
                of_critic.step()
                of_generator.zero_grad()
                generators.step(loss(critic(made), 1.0))
                of_generator.step()
                total, samples = total + found.item() * bool(counted), samples + counted
            critics.report("critic_loss", total, int(samples))
        if critics.rank == 0:
            torch.save({"critic": critic.state_dict(), "generator": generator.state_dict()}, "gan.pt")
            print(f"saved after {sum(critics.samples)} samples of {critics.ranks} workers")


if __name__ == "__main__":
    main()
