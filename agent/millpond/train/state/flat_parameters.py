# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): a model whose state and gradients are views of two flat vectors, which are sent as they are.

Both are float32 and laid out as ``flat.describe`` says. Parameters are views of ``state``, their gradients of
``sums``. Parameters of another dtype or on a GPU, and running statistics, which also change in training, are
copied: to ``state`` as they are, to ``sums`` as their gradient or their change. Frozen parameters and local
layers are in neither.

A change of a buffer is rounded towards 0, and is 0 where the bits stay, infinite ones too: a mean of changes
from one state never leads beyond the values that they lead to, so that no variance falls below 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection

import numpy as np
import torch
from torch import nn

from millpond.base.errors import LocalError
from millpond.train import error_texts
from millpond.train.state import flat, layout
from millpond.train.state.flat import Vector

_PART = 1 << 15


class FlatParameters:
    """Binds ``model`` to the vector ``state``, which takes the model's values, and to ``sums``, both [size];
    without them to memory of its own (PyTorch FSDP's FlatParameter does the same). Raises LocalError for a
    state that a flat vector cannot carry. Tensors with ``local`` names are left out.
    """

    def __init__(
        self,
        model: nn.Module,
        state: Vector | None = None,
        sums: Vector | None = None,
        local: Collection[str] = (),
    ) -> None:
        self.tensors, self.local = flat.describe(model, local), frozenset(local)
        size = layout.size(self.tensors)
        self.state = np.empty(size, np.float32) if state is None else state
        self.sums = np.empty(size, np.float32) if sums is None else sums
        self.model = model
        self._spans = {tensor.name: span for tensor, span in layout.spans(self.tensors)}
        self._end = layout.parameters_end(self.tensors)
        flat.read(model, self.state, self.tensors)
        self._parameters, self._again = _parameters(model, local)
        self._views: dict[str, torch.Tensor] = {}
        self._constants = self._checksums(flat.constant_names(model) - self.local)
        self._touched: set[str] | None = None
        total = torch.from_numpy(self.sums)
        self._gradients = {
            name: total[self._spans[name]].view(parameter.shape)
            for name, parameter in self._parameters.items()
        }
        self.bind(self.state)
        copied = {name for name in self._parameters if name not in self._views}
        self._buffers = [tensor for tensor in self.tensors if tensor.buffer]
        self._copied = [tensor for tensor in self.tensors if tensor.buffer or tensor.name in copied]

    @property
    def added(self) -> tuple[tuple[int, int], ...]:
        """The spans of the buffers, to which ``take_mean`` adds the mean."""
        return ((self._end, len(self.state)),) if self._buffers else ()

    def bind(self, state: Vector) -> None:
        """Bind the model's state to another vector [size] that has its values."""
        self.state = state
        values = torch.from_numpy(state)
        for name, parameter in self._parameters.items():
            if parameter.dtype == torch.float32 and parameter.is_cpu:
                self._views[name] = values[self._spans[name]].view(parameter.shape)
                parameter.data = self._views[name]

    def load(self, state: Vector) -> None:
        """Take the values of another vector [size]. Raises LocalError."""
        self.state[:] = state
        self.loaded()

    def check_unchanged(self, state: Vector) -> None:
        """Raise LocalError if the model itself has changed a parameter since ``load(state)``, or has put one
        where it would not follow ``state``.
        """
        self.check_bound()
        changed = np.flatnonzero(self.state.view(np.int32) != state.view(np.int32))
        if changed.size:
            raise LocalError(error_texts.CHANGED_PARAMETER(layout.name_at(self.tensors, int(changed[0]))))

    def check_bound(self) -> None:
        """Raise LocalError if the model has put a parameter where it would not follow ``state``."""
        now = dict(self.model.named_parameters(remove_duplicate=False))
        for name, parameter in self._parameters.items():
            view = self._views.get(name)
            if now.get(name) is not parameter or not (view is None or parameter.is_set_to(view)):
                self.bind(self.state)
                raise LocalError(error_texts.CHANGED_PARAMETER(name))
        for name, found in self._checksums(self._constants).items():
            if found != self._constants[name]:
                raise LocalError(error_texts.CHANGED_CONSTANT(name))

    def _checksums(self, names: Collection[str]) -> dict[str, int]:
        """Return checksums of the buffers with these names, which have to be constants."""
        own = self.model.state_dict() if names else {}
        return {name: flat.checksum_of(own[name]) for name in names}

    def loaded(self) -> None:
        """Copy a newly filled ``state`` to all that is no view of it. Raises LocalError."""
        values = self.model.state_dict() if self._copied else {}
        for tensor in self._copied:
            flat.put(values[tensor.name], self.state[self._spans[tensor.name]], tensor)

    def clear(self) -> None:
        """Zero the gradients, before ``backward`` adds to them."""
        if self._touched is None:
            touched: set[str] = set()
            self._touched = touched
            for name, parameter in self._parameters.items():
                note = functools.partial(_note, touched, name)
                parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        self._touched.clear()
        self.sums[:] = 0.0
        for name, parameter in self._parameters.items():
            parameter.grad = self._gradients[name] if name in self._views else None

    def gather_gradients(self, weight: float) -> tuple[float, float, float]:
        """Complete ``sums`` after ``backward`` over samples of this weight. Returns the largest magnitude of
        parameters in it and their L2 norm, and the largest magnitude of buffers.
        """
        for name, target in self._gradients.items():
            gradient = self._parameters[name].grad
            if gradient is None:
                target.zero_()
            elif gradient is not target:  # of another dtype, or it was set to None before ``backward``
                target.copy_(gradient)
        return (*self._measured(), self._gather_buffers(self.state, weight))

    def gather_differences(
        self, before: Vector, samples: int, steps: float = 1.0
    ) -> tuple[float, float, float]:
        """Set ``sums`` to the difference of training from state ``before``, times ``samples`` and over
        ``steps``; of buffers it is the change times ``samples``. Returns as ``gather_gradients``.
        """
        values = self.model.state_dict() if self._copied else {}
        for tensor in self._copied:
            self.state[self._spans[tensor.name]] = _float32(values[tensor.name])
        return (*self._measured(before, samples / steps), self._gather_buffers(before, samples))

    def _measured(self, before: Vector | None = None, samples: float = 1.0) -> tuple[float, float]:
        """Return the largest magnitude of parameters in ``sums`` and their norm, part by part: each is in the
        processor's cache for all that is done with it, and no sum of squares is so long that float32 loses
        small ones. With ``before``, each part is first set to the difference from it, times ``samples``.
        """
        largest = squares = 0.0
        with np.errstate(over="ignore", invalid="ignore"):  # the host refuses what is not finite
            for start in range(0, self._end, _PART):
                span = slice(start, min(start + _PART, self._end))
                part = self.sums[span]
                if before is not None:
                    np.subtract(before[span], self.state[span], out=part)
                    part *= np.float32(samples)
                largest = max(largest, -float(part.min()), float(part.max()))
                squares += float(np.dot(part, part))
        return math.nan if math.isnan(squares) else largest, math.sqrt(squares)

    def _gather_buffers(self, before: Vector, weight: float) -> float:
        """Set ``sums`` to the changes of buffers from state ``before``. Returns the largest magnitude."""
        values = self.model.state_dict() if self._buffers else {}
        for tensor in self._buffers:
            span = self._spans[tensor.name]
            self.sums[span] = _changed(before[span], _float32(values[tensor.name]), weight)
        return float(np.abs(self.sums[self._end :]).max(initial=0.0))

    @property
    def unused(self) -> tuple[int, ...]:
        """The numbers of the trained parameters that had no gradient since ``clear``."""
        return tuple(n for n, name in enumerate(self._parameters) if name not in (self._touched or ()))

    def take_mean(self, unused: Collection[int] = ()) -> None:
        """Take the mean in ``sums``: set the gradients, of ``unused`` parameters to none, and change buffers.
        Raises LocalError.
        """
        for number, (name, parameter) in enumerate(self._parameters.items()):
            parameter.grad = None if number in unused else self._gradients[name].to(parameter.dtype)
        self.state[self._end :] += self.sums[self._end :]
        self.loaded()

    def complete(self) -> None:
        """Complete ``state`` for sending: parameters with two names are in it under both."""
        for name, first in self._again.items():
            self.state[self._spans[name]] = self.state[self._spans[first]]


def _note(touched: set[str], name: str, _parameter: torch.Tensor) -> None:
    touched.add(name)


def _changed(before: Vector, after: Vector, weight: float) -> Vector:
    """Return the change times ``weight``, see the module."""
    with np.errstate(over="ignore", invalid="ignore"):  # the host refuses what is not finite
        exact = (after.astype(np.float64) - before) * weight
        found = exact.astype(np.float32)
        beyond = np.abs(found) > np.abs(exact)
        found[beyond] = np.nextafter(found[beyond], np.float32(0))
    found[before.view(np.int32) == after.view(np.int32)] = 0.0
    return found


def _float32(value: torch.Tensor) -> Vector:
    found: Vector = value.detach().reshape(-1).to("cpu", torch.float32).numpy()
    return found


def _parameters(model: nn.Module, local: Collection[str]) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Return the parameters that are trained and not ``local`` by name, and by each further name its first
    one.
    """
    found: dict[str, nn.Parameter] = {}
    again: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad or name in local:
            continue
        if id(parameter) in first:
            again[name] = first[id(parameter)]
        else:
            first[id(parameter)], found[name] = name, parameter
    return found, again
