# SPDX-License-Identifier: Apache-2.0
"""Pure: FedAvgM, averaging with momentum on the server (Hsu et al. 2019, arXiv:1909.06335)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from millpond.train.strategies.strategy import Strategy, check_rate, check_within

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FedAvgM(Strategy):
    """``v = momentum * v + mean``, ``w -= learning_rate * v``."""

    learning_rate: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        check_within("momentum", self.momentum, 0.0, 1.0)

    def step(self, value: Tensor, mean: Tensor, kept: dict[str, Tensor]) -> None:
        if "velocity" not in kept:
            kept["velocity"] = mean.clone()
        else:
            kept["velocity"].mul_(self.momentum).add_(mean)
        value.sub_(kept["velocity"], alpha=self.learning_rate)
