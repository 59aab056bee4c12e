# SPDX-License-Identifier: Apache-2.0
"""Pure: FedNova, differences normalized by local steps (Wang et al. 2020, arXiv:2007.07481).

A device with more batches takes more local steps, and pulls the mean towards its own optimum beyond its share
of the samples. Each device divides its difference by ``a``, the weight that its local steps gave to
gradients in all: the number of steps for plain SGD; with momentum later gradients have had less time to act;
a proximal term forgets early ones. The host multiplies the mean with the mean of ``a`` by samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.train.strategies.fedavg import FedAvg
from millpond.train.strategies.strategy import MOST, LocalRule, check_within


@dataclass(frozen=True, slots=True)
class FedNova(FedAvg):
    """``w -= learning_rate * mean(a) * mean(difference / a)``; with ``mu`` a proximal term as in FedProx."""

    mu: float = 0.0

    def __post_init__(self) -> None:
        FedAvg.__post_init__(self)
        check_within("mu", self.mu, 0.0, MOST)

    @property
    def local(self) -> LocalRule:
        return LocalRule(proximal=self.mu, normalized=True)


def accumulated(
    steps: int, rate: float, *, momentum: float, dampening: float, nesterov: bool, proximal: float
) -> float:
    """Return ``a``: how far so many steps of SGD go with gradients of 1, over the learning rate.

    As SGD is linear in the gradients, this is the sum of the weights of all of them. It is ``steps`` without
    momentum and proximal term, ``(steps - p * (1 - p**steps) / (1 - p)) / (1 - p)`` with momentum ``p``, and
    ``(1 - (1 - rate * proximal)**steps) / (rate * proximal)`` with a proximal term alone.
    """
    moved = velocity = 0.0
    for step in range(steps):
        gradient = 1.0 - rate * proximal * moved
        velocity = gradient if not step else momentum * velocity + (1 - dampening) * gradient
        taken = velocity if momentum else gradient
        moved += gradient + momentum * velocity if nesterov else taken
    return moved
