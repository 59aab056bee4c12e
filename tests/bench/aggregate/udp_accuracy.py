# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): federated averaging of digits in one process, over a link that loses datagrams or one that
does not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from aggregate.udp.fake_link import FakeLink, Faults, Vector, heads_of
from millpond.aggregate.udp.datagrams import VectorPlan

CLIENTS, ROUNDS = 10, 40
VALUES = 90
"""Values of a datagram: the model is small, and so are its datagrams, 191 of them."""
_TEST = 360
_BATCH, _RATE = 16, 0.1


def accuracy(seed: int, lost: float, rounds: int = ROUNDS) -> tuple[float, int]:
    """Return the final accuracy of the aggregator's model in percent, and how many values it has; ``lost`` is
    the share of datagrams that the link loses, for good.
    """
    torch.set_num_threads(1)  # the model is small: more would wait for each other
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    x = torch.tensor(images[order] / 16.0, dtype=torch.float32)
    y = torch.tensor(labels[order])
    shares = np.array_split(np.arange(_TEST, len(y)), CLIENTS)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    state = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
    states, weights = [state] * CLIENTS, [float(len(share)) for share in shares]
    for number in range(rounds):
        trained = [
            _trained(model, own, x[share], y[share], seed * 1000 + number) * np.float32(len(share))
            for own, share in zip(states, shares, strict=True)
        ]
        state, states = _averaged(trained, weights, lost, seed * 1000 + number)
    nn.utils.vector_to_parameters(torch.from_numpy(state), model.parameters())
    with torch.no_grad():
        right = (model(x[:_TEST]).argmax(1) == y[:_TEST]).float().mean()
    return 100 * float(right), len(state)


def _trained(model: nn.Module, state: Vector, x: torch.Tensor, y: torch.Tensor, seed: int) -> Vector:
    nn.utils.vector_to_parameters(torch.from_numpy(state.copy()), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), _RATE)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    for batch in torch.split(order, _BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return np.asarray(nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy())


def _averaged(
    vectors: list[Vector], weights: list[float], lost: float, seed: int
) -> tuple[Vector, list[Vector]]:
    """Return the aggregator's mean and what each client has of it. Without loss: the bits that TCP brings."""
    plan = VectorPlan(seed & 0xFFFF, len(vectors[0]), VALUES, repair=False)
    heads = [replace(head, weight=weight) for head, weight in zip(heads_of(vectors), weights, strict=True)]
    link = FakeLink(plan, vectors, heads, Faults(lost=lost), seed=seed)
    link.run()
    counts, nothing = link.aggregator.arrivals.counts, b"\0" * plan.datagram
    parts = [
        link.sums.payload(index) if counts[index] else nothing[: 4 * plan.length(index)]
        for index in range(plan.blocks)
    ]
    return np.frombuffer(b"".join(parts), np.float32).copy(), [each.mean for each in link.vectors]
