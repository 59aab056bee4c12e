# SPDX-License-Identifier: Apache-2.0
"""Entry: trains models by Opacus. ``opacus_peer.py DIGITS TEST DELTA`` reads settings as JSON, each a
``Central`` with an epsilon and a seed, and prints their accuracies in percent as JSON.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from opacus import PrivacyEngine
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from bench.privacy.dp_settings import PIXELS, model_of_units


def main() -> None:
    """Train and tell."""
    file, test, delta = sys.argv[1:]
    warnings.simplefilter("ignore")
    data = np.load(file)
    found = []
    for one in json.load(sys.stdin):
        images = torch.from_numpy(data["images"][one["seed"]])
        labels = torch.from_numpy(data["labels"][one["seed"]])
        found.append(_accuracy(one, images, labels, int(test), float(delta)))
    print(json.dumps(found))


def _accuracy(
    one: dict[str, Any], images: torch.Tensor, labels: torch.Tensor, test: int, delta: float
) -> float:
    torch.manual_seed(one["seed"])
    size, own = one["samples"], one["training"]
    units = (len(labels) - test) // size
    train = TensorDataset(
        images[: units * size].view(units, size, PIXELS), labels[: units * size].view(units, size)
    )
    model = model_of_units(own["model"])
    loader = DataLoader(train, batch_size=one["batch"] or units)
    model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=own["rate"], momentum=own["momentum"]),
        data_loader=loader,
        target_epsilon=one["epsilon"],
        target_delta=delta,
        epochs=math.ceil(own["rounds"] / len(loader)),
        max_grad_norm=own["clip"] / own["rate"],  # of a gradient: the clip is that of a step
        poisson_sampling=bool(one["batch"]),
    )
    for batch, wanted in _batches(loader, own["rounds"]):
        optimizer.zero_grad()
        loss = cross_entropy(model(batch).flatten(0, -2), wanted.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        right = model.eval()(images[-test:, None]).flatten(0, -2).argmax(1) == labels[-test:]
    return float(100 * right.float().mean())


def _batches(loader: DataLoader[Any], count: int) -> Iterator[Any]:
    """Yield so many batches, of as many epochs as it takes."""
    while count > 0:
        for batch in loader:
            if count > 0:
                yield batch
            count -= 1


if __name__ == "__main__":
    main()
