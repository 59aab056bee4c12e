# SPDX-License-Identifier: Apache-2.0
"""Pure: FedAvg, the mean by samples (McMahan et al. 2017, arXiv:1602.05629)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from millpond.train.strategies.strategy import Strategy, check_rate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FedAvg(Strategy):
    """``w -= learning_rate * mean``."""

    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)

    def step(self, value: Tensor, mean: Tensor, kept: dict[str, Tensor]) -> None:  # noqa: ARG002
        value.sub_(mean, alpha=self.learning_rate)
