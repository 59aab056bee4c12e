# SPDX-License-Identifier: Apache-2.0
"""Pure (torch): samples rebuilt from gradients, three ways, each written from its paper.

``analytic``: each row of the gradient of a linear layer is a weighted sum of its inputs, and the gradient of
its bias the sum of the weights, so their quotient is a weighted mean of inputs (Phong et al. 2018,
doi:10.1109/TIFS.2017.2787987, section 3). Where one sample alone excites a neuron it is that sample.

``matched``: dummy samples are moved until their gradient is the one that was seen: by its squared distance
(deep leakage from gradients, Zhu et al. 2019, arXiv:1906.08935) or by its angle and with a penalty of the
total variation (inverting gradients, Geiping et al. 2020, arXiv:2003.14053).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy

from bench.privacy.measures import Floats

Distance = Literal["squares", "angle"]
_VARIATION = 1e-4
"""The weight of the total variation where gradients are compared by their angle."""


def analytic(weight: Floats, bias: Floats) -> Floats:
    """Return a picture for each neuron of the first layer, from the gradients of its weight [neurons, pixels]
    and bias [neurons]: [at most neurons, pixels], those of the most excited first.
    """
    order = np.argsort(-np.abs(bias))
    order = order[np.abs(bias)[order] > 1e-9]
    found: Floats = weight[order] / bias[order, None]
    return found


def labels_of(bias: Floats, chances: Floats, samples: int) -> NDArray[np.int64]:
    """Return the labels of ``samples`` samples from the gradient of the last layer's bias, which is the sum
    of ``chances - (label is the class)`` (Geng et al. 2021, arXiv:2110.09074, with the mean ``chances`` of
    the model at its first state).
    """
    counts = np.maximum(samples * chances - bias, 0)
    whole = np.floor(counts).astype(int)
    rest = np.argsort(-(counts - whole))
    for place in range(samples - int(whole.sum())):
        whole[rest[place % len(rest)]] += 1
    return np.repeat(np.arange(len(whole)), whole)[:samples]


def matched(
    model: nn.Module, seen: Floats, labels: NDArray[np.int64], distance: Distance, steps: int, seed: int
) -> Floats:
    """Return pictures [n, 64] of these labels whose summed gradient at the ``model`` is near the one that was
    ``seen``.
    """
    generator = torch.Generator().manual_seed(seed)
    dummy = torch.rand(len(labels), 1, 8, 8, generator=generator).requires_grad_()
    goal, classes = torch.tensor(seen, dtype=torch.float32), torch.from_numpy(labels)
    optimizer = torch.optim.Adam([dummy], 0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 1e-3)
    parameters = list(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(dummy), classes, reduction="sum")
        made = torch.autograd.grad(loss, parameters, create_graph=True)
        own = torch.cat([part.reshape(-1) for part in made])
        _far(own, goal, dummy, distance).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            dummy.clamp_(0, 1)
    return dummy.detach().numpy().reshape(len(labels), -1).astype(float)


def _far(own: torch.Tensor, goal: torch.Tensor, dummy: torch.Tensor, distance: Distance) -> torch.Tensor:
    if distance == "squares":
        squares: torch.Tensor = ((own - goal) ** 2).sum() / (goal**2).sum()
        return squares
    angle = 1 - torch.dot(own, goal) / (own.norm() * goal.norm() + 1e-12)
    across, down = (dummy.diff(dim=way).abs().mean() for way in (2, 3))
    found: torch.Tensor = angle + _VARIATION * (across + down)
    return found
