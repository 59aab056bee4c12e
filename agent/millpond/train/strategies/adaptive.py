# SPDX-License-Identifier: Apache-2.0
"""Pure: the common part of adaptive federated optimization (Reddi et al. 2021, arXiv:2003.00295).

``m = beta1 * m + (1 - beta1) * mean`` and ``w -= learning_rate * m / (sqrt(v) + tau)``, without a correction
of bias; ``v`` begins with ``tau**2``. The strategies differ in how ``v`` follows the squares of the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from millpond.train.strategies.strategy import Strategy, check_rate, check_within

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Adaptive(Strategy):
    """A strategy whose steps follow the mean and its squares."""

    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        check_within("beta1", self.beta1, 0.0, 1.0)
        check_within("beta2", self.beta2, 0.0, 1.0)
        check_within("tau", self.tau, 1e-12, 1.0)

    def step(self, value: Tensor, mean: Tensor, kept: dict[str, Tensor]) -> None:
        if not kept:
            kept["m"] = mean.new_zeros(mean.shape)
            kept["v"] = mean.new_full(mean.shape, self.tau**2)
        kept["m"].mul_(self.beta1).add_(mean, alpha=1 - self.beta1)
        self.follow(kept["v"], mean.square())
        value.addcdiv_(kept["m"], kept["v"].sqrt().add_(self.tau), value=-self.learning_rate)

    def follow(self, v: Tensor, squares: Tensor) -> None:
        """Have ``v`` follow the squares of a mean."""
        raise NotImplementedError
