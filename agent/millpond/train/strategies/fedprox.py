# SPDX-License-Identifier: Apache-2.0
"""Pure: FedProx, local training that is held near the round's state (Li et al. 2020, arXiv:1812.06127)."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.train.strategies.fedavg import FedAvg
from millpond.train.strategies.strategy import MOST, LocalRule, check_within


@dataclass(frozen=True, slots=True)
class FedProx(FedAvg):
    """Devices minimize ``loss + mu / 2 * |w - w_round|**2``; the server averages as FedAvg does."""

    mu: float = 0.01

    def __post_init__(self) -> None:
        check_within("mu", self.mu, 0.0, MOST)
        FedAvg.__post_init__(self)

    @property
    def local(self) -> LocalRule:
        return LocalRule(proximal=self.mu)
