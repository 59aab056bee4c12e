# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): a model whose state and gradients are views of two flat vectors, which are sent as they are.

Both are float32 and laid out as ``flat.describe`` says. Parameters are views of ``state``, their gradients of
``sums``. Running statistics, which also change in training, are copied: into ``state`` as they are, into
``sums`` as their change times the number of samples, so that the same division that makes a mean gradient
makes a mean change. Parameters that may not be trained stay as they are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from millpond.base.errors import LocalError
from millpond.train.state import flat, layout
from millpond.train.state.flat import Vector

CHANGED = "the model's forward changes its parameter '{}'; in a synchronous job only the optimizer may"


class FlatParameters:
    """Binds ``model`` to the vector ``state``, which takes the model's values, and to ``sums``, both [size];
    without them to memory of its own (PyTorch FSDP's FlatParameter does the same). Raises LocalError for a
    state that a flat vector cannot carry, and for parameters that are not float32: these could not be views.
    """

    def __init__(self, model: nn.Module, state: Vector | None = None, sums: Vector | None = None) -> None:
        self.tensors = flat.describe(model)
        size = layout.size(self.tensors)
        self.state = np.empty(size, np.float32) if state is None else state
        self.sums = np.empty(size, np.float32) if sums is None else sums
        self.model = model
        self._spans = {tensor.name: span for tensor, span in layout.spans(self.tensors)}
        flat.read(model, self.state)
        self._bound, self._again = _parameters(model)
        trained = {name: parameter for name, parameter in self._bound.items() if parameter.requires_grad}
        for name, parameter in trained.items():
            if parameter.dtype != torch.float32:
                raise LocalError(f"the model's parameter '{name}' is not float32; call .float() on the model")
        total = torch.from_numpy(self.sums)
        self._gradients = {n: total[self._spans[n]].view(p.shape) for n, p in trained.items()}
        self.bind(self.state)
        buffers = dict(model.named_buffers(remove_duplicate=False))
        self._buffers = [tensor for tensor in self.tensors if tensor.name in buffers]

    def bind(self, state: Vector) -> None:
        """Bind the model's state to another vector [size] that has its values."""
        self.state = state
        values = torch.from_numpy(state)
        self._views = {name: values[self._spans[name]].view(p.shape) for name, p in self._bound.items()}
        for name, parameter in self._bound.items():
            parameter.data = self._views[name]

    def check_bound(self) -> None:
        """Raises LocalError if the model has put a parameter where it would not follow ``state``."""
        now = dict(self.model.named_parameters(remove_duplicate=False))
        for name, parameter in self._bound.items():
            if now.get(name) is not parameter or not parameter.is_set_to(self._views[name]):
                self.bind(self.state)
                raise LocalError(CHANGED.format(name))

    def tensor_at(self, place: int) -> str:
        """Return the name of the tensor that has this place in ``state``."""
        return next(name for name, span in self._spans.items() if span.start <= place < span.stop)

    def loaded(self) -> None:
        """Copy a newly filled ``state`` to the buffers; parameters are views of it. Raises LocalError."""
        values = self.model.state_dict() if self._buffers else {}
        with torch.no_grad():
            for tensor in self._buffers:
                part = self.state[self._spans[tensor.name]]
                if tensor.dtype in layout.INTEGERS:
                    part = flat.whole(part, tensor.name)
                target = values[tensor.name]
                target.copy_(torch.from_numpy(part.copy()).view(target.shape))

    def clear(self) -> None:
        """Zero the gradients, before ``backward`` adds to them."""
        self.sums[:] = 0.0
        self._attach()

    def gather(self, samples: int) -> None:
        """Complete ``sums`` after ``backward`` over ``samples`` samples."""
        for name, target in self._gradients.items():
            parameter = self._bound[name]
            if parameter.grad is None:
                target.zero_()
            elif parameter.grad is not target:  # it was set to None before ``backward``
                target.copy_(parameter.grad)
        values = self.model.state_dict() if self._buffers else {}
        for tensor in self._buffers:
            span = self._spans[tensor.name]
            change = values[tensor.name].detach().reshape(-1).to(torch.float32).numpy() - self.state[span]
            self.sums[span] = change * np.float32(samples)

    def take_mean(self) -> None:
        """Take the mean in ``sums``: set the gradients, and change buffers. Raises LocalError."""
        self._attach()
        for tensor in self._buffers:
            span = self._spans[tensor.name]
            self.state[span] += self.sums[span]
        self.loaded()

    def complete(self) -> None:
        """Complete ``state`` for sending: parameters with two names are in it under both."""
        for name, first in self._again.items():
            self.state[self._spans[name]] = self.state[self._spans[first]]

    def _attach(self) -> None:
        for name, target in self._gradients.items():
            self._bound[name].grad = target


def _parameters(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Return by name the parameters that may be trained or could be views, and for each further name of one
    of them its first name.
    """
    bound: dict[str, nn.Parameter] = {}
    again: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad and parameter.dtype != torch.float32:
            continue
        if id(parameter) in first:
            again[name] = first[id(parameter)]
        else:
            first[id(parameter)], bound[name] = name, parameter
    return bound, again
