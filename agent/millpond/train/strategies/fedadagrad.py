# SPDX-License-Identifier: Apache-2.0
"""Pure: FedAdagrad (Reddi et al. 2021, arXiv:2003.00295)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from millpond.train.strategies.adaptive import Adaptive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FedAdagrad(Adaptive):
    """``v += mean**2``; its ``m`` is the mean itself unless ``beta1`` says otherwise."""

    learning_rate: float = 0.1
    beta1: float = 0.0

    def follow(self, v: Tensor, squares: Tensor) -> None:
        v.add_(squares)
