# SPDX-License-Identifier: Apache-2.0
"""Pure: the coordinate-wise trimmed mean of updates (Yin et al. 2018, arXiv:1803.01498).

Of each coordinate, ``share`` of the values (rounded up to whole devices, so that some are left) are left out
at either end. As many devices may send what they like.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.train.strategies.fedavg import FedAvg
from millpond.train.strategies.strategy import Combination


@dataclass(frozen=True, slots=True)
class TrimmedMean(FedAvg):
    """``w -= learning_rate * trimmed mean``; each device has one vote."""

    share: float = 0.2

    def __post_init__(self) -> None:
        Combination("trimmed", self.share)
        FedAvg.__post_init__(self)

    @property
    def combine(self) -> Combination:
        return Combination("trimmed", self.share)
