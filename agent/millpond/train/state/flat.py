# SPDX-License-Identifier: Apache-2.0
"""Pure: the exchanged part of a model's state as one flat float32 vector: all but frozen parameters and local
layers.

float32, float16 and bfloat16 survive the way there and back bit by bit. Whole numbers up to 2**24 do as well;
an average of them is rounded to the nearest. float64 would lose bits and is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from millpond.base.errors import LocalError
from millpond.base.schema import nearest
from millpond.train.state import layout
from millpond.train.state.layout import Tensor

_EXACT = 1 << 24
Vector = NDArray[np.float32]


def describe(model: nn.Module, local: Collection[str] = ()) -> tuple[Tensor, ...]:
    """Return the layout of a model's state without its frozen parameters, and without those tensors that are
    ``local``. Raises LocalError for tensors that float32 cannot carry.
    """
    left_out = frozen_names(model).union(local)
    tensors = describe_some(model, model.state_dict().keys() - left_out)
    if layout.size(tensors) == 0:
        raise LocalError("the model has no parameter that may be trained")
    return tensors


def describe_unsent(model: nn.Module, local: Collection[str] = ()) -> tuple[Tensor, ...]:
    """Return the layout of what ``describe`` leaves out. Raises LocalError as it does."""
    return describe_some(model, frozen_names(model).union(local))


def describe_some(model: nn.Module, names: Collection[str]) -> tuple[Tensor, ...]:
    """Return the layout of the tensors with these names, parameters before buffers. Raises LocalError as
    ``describe``.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    named = [(name, value) for name, value in model.state_dict().items() if name in names]
    found = (_describe(name, value, name not in parameters) for name, value in named)
    return tuple(sorted(found, key=lambda tensor: tensor.buffer))


def local_names(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """Return the names in a model's state that match one of ``patterns``, such as "head.*". Raises LocalError
    for a pattern that matches none, for a parameter that has another name, too, which matches none, and if no
    parameter that may be trained is left.
    """
    names = list(model.state_dict())
    for pattern in patterns:
        if not layout.matching(names, [pattern]):
            hint = nearest(pattern, dict.fromkeys(f"{name.partition('.')[0]}*" for name in names))
            raise LocalError(f"federated: local: '{pattern}' is no parameter or buffer of the model{hint}")
    local = frozenset(layout.matching(names, patterns))
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if (name in local) != (other in local):
            raise LocalError(f"federated: local: '{name}' is the same parameter as '{other}': name both")
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if local and not free - local:
        raise LocalError("federated: local: no parameter that may be trained is left to be averaged")
    return local


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that may not be trained."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def freeze(model: nn.Module, names: Collection[str]) -> None:
    """Freeze the parameters with these names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in names:
            parameter.requires_grad_(False)


def checksum(model: nn.Module, local: Collection[str] = ()) -> int:
    """Return a checksum of the names and bits of what ``describe`` leaves out, 0 without any."""
    found, values = 0, dict(model.named_parameters(remove_duplicate=False)) | model.state_dict()
    for name in sorted(frozen_names(model).union(local)):
        value = values[name].detach().cpu().contiguous()
        found = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), found))
    return found


def _describe(name: str, value: object, buffer: bool) -> Tensor:
    if not isinstance(value, torch.Tensor):
        raise LocalError(f"the model's state '{name}' is a {type(value).__name__}, not a tensor")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in layout.FLOATS + layout.INTEGERS:
        hint = "; call .float() on the model" if dtype == "float64" else ""
        raise LocalError(f"the model's tensor '{name}' is {dtype}, which float32 cannot carry{hint}")
    return Tensor(name, tuple(value.shape), dtype, buffer)


def read(model: nn.Module, out: Vector, tensors: tuple[Tensor, ...] | None = None) -> None:
    """Copy the tensors of a model, those of ``describe`` if left out, into ``out`` [size]. Raises
    LocalError, also for whole numbers over 2**24.
    """
    tensors = describe(model) if tensors is None else tensors
    _check_size(tensors, out)
    values = model.state_dict()
    for tensor, span in layout.spans(tensors):
        value = values[tensor.name].detach().to("cpu").reshape(-1)
        if tensor.dtype in layout.INTEGERS and value.numel() and value.double().abs().max() > _EXACT:
            raise LocalError(f"the model's tensor '{tensor.name}' holds numbers over {_EXACT}")
        out[span] = value.to(torch.float32).numpy()


def write(model: nn.Module, values: Vector, tensors: tuple[Tensor, ...]) -> None:
    """Copy ``values`` [size], laid out as ``tensors``, into a model. Raises LocalError."""
    _check_size(tensors, values)
    own = model.state_dict()
    for tensor, span in layout.spans(tensors):
        put(own[tensor.name], values[span], tensor)


@torch.no_grad()
def put(target: torch.Tensor, part: Vector, tensor: Tensor) -> None:
    """Copy the values of one tensor into ``target``. Raises LocalError."""
    if tensor.dtype in layout.INTEGERS:
        part = whole(part, tensor.name)
    target.copy_(torch.from_numpy(part.copy()).view(target.shape))


def whole(part: Vector, name: str) -> Vector:
    """Return ``part`` rounded to whole numbers. Raises LocalError if it is not finite."""
    if not np.isfinite(part).all():
        raise LocalError(f"'{name}' should be whole numbers, and is not finite")
    return np.rint(part)


def _check_size(tensors: tuple[Tensor, ...], vector: Vector) -> None:
    if vector.dtype != np.float32 or vector.shape != (layout.size(tensors),):
        raise LocalError(
            f"the model's state is {layout.size(tensors)} float32 values; got {vector.dtype} {vector.shape}"
        )
