"""Edge (torch): a model whose state and gradients lie in two flat vectors, which are sent as they are.

Both are float32 and laid out as ``flat.describe`` says. Parameters are views of ``state``, their gradients of
``sums``. What else changes in training, running statistics, is copied: into ``state`` as it is, into ``sums``
as its change times the number of samples, so that the same division that makes a mean gradient makes it a
mean change. What may not be trained stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from millpond.train import flat, layout
from millpond.train.flat import Vector
from millpond.wire.errors import LocalError


def _allocate(values: int) -> Vector:
    return np.zeros(values, np.float32)


class Binding:
    """Binds ``model``. ``allocate`` makes the memory of all vectors, one behind the other, for a number of
    values: of ``states`` states, of which the model is bound to the first, and of the sums. Raises LocalError
    for a state that a flat vector cannot carry, and for parameters that are not float32: theirs could not be
    views.
    """

    def __init__(
        self, model: nn.Module, allocate: Callable[[int], Vector] = _allocate, states: int = 1
    ) -> None:
        self.tensors = flat.describe(model)
        size = layout.size(self.tensors)
        *self._states, self.sums = np.split(allocate((states + 1) * size), states + 1)
        self.state = self._states[0]
        self.model = model
        self._spans = {tensor.name: span for tensor, span in layout.spans(self.tensors)}
        flat.read(model, self.state)
        self._bound, self._again = _parameters(model)
        for name, parameter in self._bound.items():
            if parameter.dtype != torch.float32:
                raise LocalError(f"the model's parameter '{name}' is not float32; call .float() on the model")
        sums = torch.from_numpy(self.sums)
        self._gradients = {n: sums[self._spans[n]].view(p.shape) for n, p in self._bound.items()}
        self._bind()
        buffers = dict(model.named_buffers(remove_duplicate=False))
        self._buffers = [tensor for tensor in self.tensors if tensor.name in buffers]

    def _bind(self) -> None:
        values = torch.from_numpy(self.state)
        for name, parameter in self._bound.items():
            parameter.data = values[self._spans[name]].view(parameter.shape)

    def move(self, number: int) -> None:
        """Go on in the state with this number, with the values of the present one, which stays as it is.
        Raises LocalError if there is none.
        """
        if not 0 <= number < len(self._states):
            raise LocalError(f"there are {len(self._states)} states, and none with number {number}")
        if self._states[number] is not self.state:
            self._states[number][:] = self.state
            self.state = self._states[number]
            self._bind()

    def loaded(self) -> None:
        """``state`` has been filled: parameters have changed with it, now buffers do. Raises LocalError."""
        values = self.model.state_dict() if self._buffers else {}
        with torch.no_grad():
            for tensor in self._buffers:
                part = self.state[self._spans[tensor.name]]
                if tensor.dtype in layout.INTEGERS:
                    part = flat.whole(part, tensor.name)
                target = values[tensor.name]
                target.copy_(torch.from_numpy(part.copy()).view(target.shape))

    def clear(self) -> None:
        """No gradients, before ``backward`` adds to them."""
        self.sums[:] = 0.0
        self._attach()

    def gather(self, samples: int) -> None:
        """After ``backward`` over ``samples`` samples: complete ``sums``."""
        for name, parameter in self._bound.items():
            target = self._gradients[name]
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
        """``sums`` now holds a mean: set gradients, and change buffers by theirs. Raises LocalError."""
        self._attach()
        for tensor in self._buffers:
            span = self._spans[tensor.name]
            self.state[span] += self.sums[span]
        self.loaded()

    def complete(self) -> None:
        """``state`` as it is sent: with parameters that have two names under both."""
        for name, first in self._again.items():
            self.state[self._spans[name]] = self.state[self._spans[first]]

    def _attach(self) -> None:
        for name, parameter in self._bound.items():
            parameter.grad = self._gradients[name]


def _parameters(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Those that may be trained by name, and the first name of those that come again under another."""
    bound: dict[str, nn.Parameter] = {}
    again: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        if id(parameter) in first:
            again[name] = first[id(parameter)]
        else:
            first[id(parameter)], bound[name] = name, parameter
    return bound, again
