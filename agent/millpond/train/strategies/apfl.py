# SPDX-License-Identifier: Apache-2.0
"""Pure: APFL, a personal model mixed with the common one (Deng, Kamani, Mahdavi 2020, arXiv:2003.13461).

Each device keeps a model ``v`` of its own, and is scored on the mixed model ``alpha * v + (1 - alpha) * w``.
In each local step ``w`` moves by its own gradient, and is averaged as by FedAvg; ``v`` moves by the gradient
of the mixed model, times ``alpha``. An adaptive ``alpha`` moves by its gradient, the inner product of
``v - w`` with that of the mixed model, at the learning rate of ``v``, and stays between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from millpond.base.errors import ConfigError
from millpond.train.strategies.fedavg import FedAvg
from millpond.train.strategies.strategy import LocalRule

FIRST_ALPHA: Final = 0.5
"""The share with which an adaptive one begins."""


@dataclass(frozen=True, slots=True)
class Apfl(FedAvg):
    """FedAvg, beside personal models that stay on their devices."""

    alpha: float | Literal["adaptive"] = FIRST_ALPHA

    def __post_init__(self) -> None:
        FedAvg.__post_init__(self)
        if self.alpha != "adaptive" and not 0 < self.alpha <= 1:
            raise ConfigError(f'alpha: {self.alpha:g} is not above 0 and at most 1, or "adaptive"')

    @property
    def local(self) -> LocalRule:
        if self.alpha == "adaptive":
            return LocalRule(alpha=FIRST_ALPHA, adaptive=True)
        return LocalRule(alpha=self.alpha)
