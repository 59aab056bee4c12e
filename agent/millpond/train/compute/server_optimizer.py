# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the parameter server's optimizer, which applies means of gradients or differences."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millpond.base.errors import LocalError
from millpond.train.compute.optimizers import Schedule
from millpond.train.state import layout
from millpond.train.state.flat import Vector
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.state.layout import Tensor as Entry


class ServerOptimizer:
    """Applies means of gradients or differences to the model of ``parameters`` with a torch optimizer, as one
    process with all samples would: at the rates of ``schedule``, gradients scaled down to the L2 norm
    ``clip_norm``.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self.parameters = parameters
        self._optimizer = optimizer
        self._schedule, self._clip_norm = schedule, clip_norm

    def apply(self, factor: float, epoch: int = 1) -> None:
        """Make one step of round or epoch ``epoch`` with the mean in ``parameters.sums``, at ``factor`` times
        the optimizer's own learning rates. The new state is then in ``parameters.state``.
        """
        self.parameters.take_mean()
        groups = self._optimizer.param_groups
        if self._clip_norm is not None:
            trained = [parameter for group in groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, self._clip_norm)
        if self._schedule:
            self._schedule.set(self._optimizer, epoch)
        own = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        self._optimizer.step()
        for group, rate in zip(groups, own, strict=True):
            group["lr"] = rate
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
