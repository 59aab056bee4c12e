# SPDX-License-Identifier: Apache-2.0
"""Pure: Per-FedAvg, a model that is good one step later (Fallah, Mokhtari, Ozdaglar 2020, arXiv:2002.07948).

Devices minimize ``f(w - a * grad f(w))``, ``a`` the inner learning rate. A batch is divided: one part has the
gradient of the inner step, another the gradient after it. That is the whole step in the first order. The
Hessian-free variant subtracts ``a`` times the product of the Hessian with that gradient ``g``, on a third
part: ``(grad f(w + delta * g) - grad f(w - delta * g)) / (2 * delta)``. Devices are scored after an inner
step with all of their training data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millpond.base.errors import ConfigError
from millpond.train.strategies.fedavg import FedAvg
from millpond.train.strategies.strategy import MOST, LocalRule


@dataclass(frozen=True, slots=True)
class PerFedAvg(FedAvg):
    """FedAvg of models that are trained to be good after one step on each device."""

    inner_learning_rate: float = 0.01
    variant: Literal["first-order", "hessian-free"] = "first-order"
    delta: float = 0.01

    def __post_init__(self) -> None:
        FedAvg.__post_init__(self)
        for key, value, most in (
            ("inner_learning_rate", self.inner_learning_rate, MOST),
            ("delta", self.delta, 1),
        ):
            if not 0 < value <= most:
                raise ConfigError(f"{key}: {value:g} is not greater than 0 and at most {most:g}")

    @property
    def local(self) -> LocalRule:
        delta = self.delta if self.variant == "hessian-free" else 0.0
        return LocalRule(inner_rate=self.inner_learning_rate, delta=delta)
