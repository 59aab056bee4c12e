# SPDX-License-Identifier: Apache-2.0
"""Pure: FedOpt, any optimizer of torch on the server (Reddi et al. 2021, arXiv:2003.00295)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millpond.base.errors import ConfigError
from millpond.train.strategies.strategy import Strategy, check_rate


@dataclass(frozen=True, slots=True)
class FedOpt(Strategy):
    """The step of ``optimizer``, a name in torch.optim or a table with a name and arguments, with the mean as
    gradient. Without a ``learning_rate`` it is 1 for SGD, else the optimizer's own.
    """

    optimizer: str | dict[str, Any] = "SGD"
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        if self.learning_rate is not None:
            check_rate(self.learning_rate)
        if {"lr", "learning_rate"} & self._table.keys():
            raise ConfigError("optimizer: write learning_rate beside the optimizer, not in it")

    @property
    def _table(self) -> dict[str, Any]:
        return {"name": self.optimizer} if isinstance(self.optimizer, str) else self.optimizer

    @property
    def torch_optimizer(self) -> dict[str, Any]:
        table = {"name": "SGD", **self._table}
        rate = self.learning_rate or (1.0 if table["name"].lower() == "sgd" else None)
        return table if rate is None else {"learning_rate": rate, **table}
