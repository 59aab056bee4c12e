# SPDX-License-Identifier: Apache-2.0
"""Pure: the coordinate-wise median of updates, against Byzantine devices (Yin et al. 2018, arXiv:1803.01498).

Whatever fewer than half of the devices of a round send, each coordinate is within the values of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.train.strategies.fedavg import FedAvg
from millpond.train.strategies.strategy import Combination


@dataclass(frozen=True, slots=True)
class CoordinateMedian(FedAvg):
    """``w -= learning_rate * median``; each device has one vote."""

    @property
    def combine(self) -> Combination:
        return Combination("median")
