# SPDX-License-Identifier: Apache-2.0
"""The example of a private GAN, in one process that has the data of all: what a launch has to agree with."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from millpond.train.balance.data_plan import Pool
from millpond.train.distributed.group import Loader, _Turn
from millpond.train.distributed.tuner import BatchTuner

EXAMPLE = Path(__file__).parents[2] / "agent/examples/private_gan.py"
LEAST = 8
PER_RANK = 32


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("private_gan", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gan = _example()


def scaled(images: np.ndarray[Any, Any]) -> torch.Tensor:
    """As the example loads them."""
    return torch.from_numpy(images.astype(np.float32).reshape(len(images), -1) / 127.5 - 1)


def trained(parts: Sequence[np.ndarray[Any, Any]], epochs: int) -> dict[str, dict[str, torch.Tensor]]:
    """What one process makes of the batches that the ranks of a launch have: ``parts`` are their images,
    those of the host first. In each step all ranks' samples are one batch.
    """
    data = [TensorDataset(scaled(images)) for images in parts]
    pools = [Pool(len(own), (rank,), LEAST if rank else 1) for rank, own in enumerate(data)]
    loaders, turns = [], [_Turn() for _ in data]
    for rank, own in enumerate(data):
        tuner = BatchTuner(PER_RANK * len(data), len(data), balanced=False)
        loaders.append(Loader(own, pools, rank, tuner, 0, turns[rank], f"csd{rank - 1}"))
    critic, generator = gan.models()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (critic, generator)]
    sources = [torch.Generator().manual_seed(rank) for rank in range(len(data))]
    for _ in range(epochs):
        for batches in zip(*loaders, strict=True):
            real, noise = [], []
            for (images,), turn, source in zip(batches, turns, sources, strict=True):
                drawn = torch.randn(len(images), gan.NOISE, generator=source)
                assert turn.work
                if turn.work.samples:
                    real.append(images)
                    noise.append(drawn)
                turn.work = None
            _step(critic, generator, optimizers, torch.cat(real), torch.cat(noise))
    return {"critic": critic.state_dict(), "generator": generator.state_dict()}


def _step(
    critic: nn.Module,
    generator: nn.Module,
    optimizers: list[torch.optim.SGD],
    real: torch.Tensor,
    noise: torch.Tensor,
) -> None:
    made = generator(noise)
    optimizers[0].zero_grad()
    ((gan.loss(critic(real), 1.0) + gan.loss(critic(made.detach()), 0.0)) / len(real)).backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    (gan.loss(critic(made), 1.0) / len(real)).backward()
    optimizers[1].step()


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest between two pairs of models."""
    found = [(one[model][key] - other[model][key]).abs().max() for model in one for key in one[model]]
    return float(max(found))


def quality(state: dict[str, Any], images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    """How sure a classifier of true digits is of what the generator makes, 0 to 100."""
    _, generator = gan.models()
    generator.load_state_dict(state["generator"])
    with torch.no_grad():
        made = generator(torch.randn(500, gan.NOISE, generator=torch.Generator().manual_seed(9)))
    from sklearn.neighbors import KNeighborsClassifier  # slow to import

    judge = KNeighborsClassifier(15).fit(scaled(images).numpy(), labels)
    return float(100 * judge.predict_proba(made.numpy()).max(axis=1).mean())


def split(images: np.ndarray[Any, Any], shares: Sequence[float]) -> list[np.ndarray[Any, Any]]:
    """Divide images by shares."""
    cuts = [int(len(images) * share) for share in np.cumsum([0.0, *shares])]
    return [images[start:stop] for start, stop in pairwise(cuts)]
