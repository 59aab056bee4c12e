# SPDX-License-Identifier: Apache-2.0
"""Pure: FedAdam (Reddi et al. 2021, arXiv:2003.00295)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from millpond.train.strategies.adaptive import Adaptive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FedAdam(Adaptive):
    """``v = beta2 * v + (1 - beta2) * mean**2``."""

    def follow(self, v: Tensor, squares: Tensor) -> None:
        v.mul_(self.beta2).add_(squares, alpha=1 - self.beta2)
