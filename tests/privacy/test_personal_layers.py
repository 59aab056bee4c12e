# SPDX-License-Identifier: Apache-2.0
"""Layers that stay on their device, and what updates of the other layers tell of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from millpond.linux.zygote.client import Zygote
from millpond.train.protocol import Update, Work
from millpond.train.state import checkpoint, flat
from millpond.train.state.layout import Tensor

from .support import SAMPLES, Host, Volume, device, soon

RATE, ROUNDS, ASKED = 0.1, 20, 40
BODY = (Tensor("body.weight", (8, 64), "float32"), Tensor("body.bias", (8,), "float32"))
CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 8)
        nn.init.eye_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images):
        return self.head(self.body(images.flatten(1)).tanh())
"""


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


def first_head() -> nn.Module:
    made = nn.Module()
    made.head = nn.Linear(8, 8)
    nn.init.eye_(made.head.weight)
    nn.init.zeros_(made.head.bias)
    return made


def changed(host: Host, exchange: int, state: np.ndarray) -> np.ndarray:
    """What one local step takes away from the body at this state."""
    host.channel.send(Work(exchange, 0, 1, (((0, SAMPLES),),)), soon(), state.astype(np.float32).tobytes())
    assert isinstance(host.channel.expect(Update, soon()), Update)
    return host.fetch() / SAMPLES


def test_known_limit_a_local_head_follows_from_updates_at_chosen_states(
    volume: Volume, zygote: Zygote
) -> None:
    """With weights of 0 in the layer below, its bias sets what the head sees, and the gradient of the bias is
    the error times the head's weights. The code is honest, and no answer is asked for twice at one state.
    """
    head, state = first_head(), np.random.default_rng(0).normal(0, 0.3, 64 * 8 + 8)
    rows = np.random.default_rng(1).normal(0, 1, (ASKED, 8))
    keys = {"tensors": BODY, "passes": 1, "batch": 1 << 16, "local": ("head.*",)}
    unsent = flat.checksum(head, ["head.weight", "head.bias"])
    with device(volume, zygote, {"net.py": CODE}, unsent=unsent, **keys) as csd0, csd0.host() as host:
        for number in range(1, ROUNDS + 1):
            state -= changed(host, number, state)
        (newest,) = volume.path.glob(f"private/.millpond/attack/personal-*{ROUNDS:03}.safetensors")
        truth = torch.from_numpy(checkpoint.load(newest).vector[: 8 * 8]).double().view(8, 8)
        asked = [changed(host, ROUNDS + 1, np.append(np.zeros(64 * 8), row))[-8:] for row in rows]
    seen = torch.from_numpy(rows).tanh()
    errors = torch.from_numpy(np.array(asked)).double() / RATE / (1 - seen**2)
    found = recovered(seen, errors)
    distance = float((found - centred(truth)).norm() / centred(truth).norm())
    before = float((torch.eye(8).double() - truth).norm() / centred(truth).norm())
    print(f"{ASKED} answers tell the head's weights to {distance:.1e} of their size; before {before:.1e}")
    assert distance < 0.01 and before > 0.04


def recovered(seen: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """The head that explains the errors, from the first values, which the host knows."""
    weights = torch.eye(8, dtype=torch.float64).requires_grad_()
    bias, labels = (torch.zeros(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.LBFGS(
        [weights, bias, labels], max_iter=1500, tolerance_grad=1e-14, tolerance_change=1e-16,
        history_size=100, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        error = torch.softmax(seen @ weights.T + bias, 1) - torch.softmax(labels, 0)
        loss = mse_loss(error @ weights, errors)
        loss.backward()
        return loss

    optimizer.step(closure)
    return centred(weights.detach())


def centred(weights: torch.Tensor) -> torch.Tensor:
    """Weights but for what changes no output of a softmax."""
    return weights - weights.mean(0)
