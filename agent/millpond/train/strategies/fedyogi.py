# SPDX-License-Identifier: Apache-2.0
"""Pure: FedYogi (Reddi et al. 2021, arXiv:2003.00295)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from millpond.train.strategies.adaptive import Adaptive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FedYogi(Adaptive):
    """``v -= (1 - beta2) * mean**2 * sign(v - mean**2)``: it shrinks more slowly than that of FedAdam."""

    def follow(self, v: Tensor, squares: Tensor) -> None:
        v.sub_(squares * (v - squares).sign(), alpha=1 - self.beta2)
