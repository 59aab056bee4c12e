# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): optimizers by name, and the parameter server's, which applies means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from millpond.base.errors import LocalError
from millpond.train.job.spec import OptimizerSpec
from millpond.train.state import layout
from millpond.train.state.flat import Vector
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.state.layout import Tensor as Entry


def make_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """Make an optimizer of the parameters that may be trained. Raises LocalError if there are none."""
    free = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not free:
        raise LocalError("the model has no parameter that may be trained")
    if spec.optimizer == "adam":
        return torch.optim.Adam(free, lr=spec.learning_rate)
    return torch.optim.SGD(free, lr=spec.learning_rate, momentum=spec.momentum)


class ServerOptimizer:
    """Applies means of gradients or differences to the model of ``parameters`` with a torch optimizer, as one
    process with all samples would.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        optimizer: torch.optim.Optimizer,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self.parameters = parameters
        self._optimizer, self._after_step = optimizer, after_step

    def apply(self, factor: float) -> None:
        """Make one step with the mean in ``parameters.sums``, at ``factor`` times the optimizer's own
        learning rates. The new state is then in ``parameters.state``.
        """
        self.parameters.take_mean()
        own = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        self._optimizer.step()
        for group, rate in zip(self._optimizer.param_groups, own, strict=True):
            group["lr"] = rate
        if self._after_step:
            self._after_step()
        self.parameters.complete()

    def momentum(self) -> tuple[tuple[Entry, ...], Vector]:
        """Return the optimizer's tensors, named ``parameter.name``, and their values as float32 [size]."""
        entries, values = [], []
        for number, state in sorted(self._optimizer.state_dict()["state"].items()):
            for name, value in sorted(state.items()):
                if isinstance(value, Tensor):
                    entries.append(Entry(f"{number}.{name}", tuple(value.shape), "float32"))
                    values.append(value.detach().reshape(-1).to(torch.float32).numpy())
        return tuple(entries), np.concatenate(values) if values else np.empty(0, np.float32)

    def restore(self, entries: tuple[Entry, ...], values: Vector) -> None:
        """Take an optimizer's tensors back. Raises LocalError for those of another optimizer."""
        self.parameters.loaded()
        whole = self._optimizer.state_dict()
        state: dict[int, dict[str, Tensor]] = {}
        for entry, span in layout.spans(entries):
            number, _, name = entry.name.partition(".")
            if not number.isdigit():
                raise LocalError(f"the checkpoint's '{entry.name}' is not of an optimizer")
            state.setdefault(int(number), {})[name] = torch.from_numpy(values[span].copy()).view(entry.shape)
        whole["state"] = state
        self._optimizer.load_state_dict(whole)
