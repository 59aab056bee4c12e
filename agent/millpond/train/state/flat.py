# SPDX-License-Identifier: Apache-2.0
"""Pure: the exchanged part of a model's state as one flat float32 vector: all but frozen parameters and local
layers.

float32, float16 and bfloat16 survive the way there and back bit by bit. Whole numbers up to 2**24 do as well;
an average of them is rounded to the nearest. Of other types, and of larger numbers, there may be constants:
frozen parameters and buffers, which are compared and left out as frozen ones are.
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
from millpond.train import error_texts
from millpond.train.state import layout
from millpond.train.state.layout import Tensor

_EXACT = 1 << 24
Vector = NDArray[np.float32]


def describe(model: nn.Module, local: Collection[str] = ()) -> tuple[Tensor, ...]:
    """Return the layout of a model's state without its frozen parameters, and without those tensors that are
    ``local``. Raises LocalError for tensors that float32 cannot carry.
    """
    left_out = unsent_names(model).union(local)
    tensors = describe_some(model, model.state_dict().keys() - left_out)
    if layout.size(tensors) == 0:
        raise LocalError(error_texts.NOT_TRAINED())
    return tensors


def describe_unsent(model: nn.Module, local: Collection[str] = ()) -> tuple[Tensor, ...]:
    """Return the layout of what ``describe`` leaves out. Raises LocalError as it does."""
    return describe_some(model, unsent_names(model).union(local))


def describe_some(model: nn.Module, names: Collection[str]) -> tuple[Tensor, ...]:
    """Return the layout of the tensors with these names, parameters before buffers. Raises LocalError as
    ``describe``.
    """
    parameters, unsent = dict(model.named_parameters(remove_duplicate=False)), unsent_names(model)
    named = [(name, value) for name, value in model.state_dict().items() if name in names]
    found = (_describe(name, value, name not in parameters, name in unsent) for name, value in named)
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


def constant_names(model: nn.Module) -> set[str]:
    """Return the names of buffers that float32 cannot carry, and which therefore have to be constants."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    own = model.state_dict()
    return {name for name, value in buffers.items() if name in own and _raw_type(value)}


def unsent_names(model: nn.Module) -> set[str]:
    """Return the names of what is never exchanged: frozen parameters and constants."""
    return frozen_names(model) | constant_names(model)


def _raw_type(value: torch.Tensor) -> str:
    """Return the type of a tensor that float32 cannot carry; "" of others."""
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in layout.RAW or dtype not in layout.INTEGERS:
        return dtype if dtype in layout.RAW else ""
    large = value.numel() and value.detach().double().abs().max() > _EXACT
    return dtype if large else ""


def freeze(model: nn.Module, names: Collection[str]) -> None:
    """Freeze the parameters with these names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in names:
            parameter.requires_grad_(False)


def checksum(model: nn.Module, local: Collection[str] = ()) -> int:
    """Return a checksum of the names and bits of what ``describe`` leaves out, 0 without any."""
    found, values = 0, dict(model.named_parameters(remove_duplicate=False)) | model.state_dict()
    for name in sorted(unsent_names(model).union(local)):
        found = checksum_of(values[name], zlib.crc32(name.encode(), found))
    return found


def checksum_of(value: torch.Tensor, before: int = 0) -> int:
    """Return a checksum of the bits of a tensor, and of what was ``before``."""
    return zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, before)


def _describe(name: str, value: object, buffer: bool, constant: bool) -> Tensor:
    if isinstance(value, torch.Tensor) and constant and (dtype := _raw_type(value)):
        return Tensor(name, tuple(value.shape), layout.raw(dtype), buffer)
    if not isinstance(value, torch.Tensor):
        raise LocalError(f"the model's state '{name}' is a {type(value).__name__}, not a tensor")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in layout.FLOATS + layout.INTEGERS:
        if buffer:
            raise LocalError(error_texts.NOT_PERSISTENT(name, dtype))
        told = error_texts.NOT_FLOAT32(name) if dtype == "float64" else error_texts.NOT_CARRIED(name, dtype)
        raise LocalError(told)
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
        if layout.raw_type(tensor.dtype):
            out[span] = value.contiguous().view(torch.uint8).numpy()
            continue
        if tensor.dtype in layout.INTEGERS and value.numel() and value.double().abs().max() > _EXACT:
            raise LocalError(error_texts.LARGE_NUMBERS(tensor.name, _EXACT))
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
    if dtype := layout.raw_type(tensor.dtype):
        data = torch.from_numpy(part.astype(np.uint8))
        target.copy_(data.view(getattr(torch, dtype)).view(target.shape))
        return
    if tensor.dtype in layout.INTEGERS:
        part = whole(part, tensor.name)
    target.copy_(torch.from_numpy(part.copy()).view(target.shape))


def whole(part: Vector, name: str) -> Vector:
    """Return ``part`` rounded to whole numbers. Raises LocalError if it is not finite."""
    if not np.isfinite(part).all():
        raise LocalError(error_texts.NOT_WHOLE_NUMBERS(name))
    return np.rint(part)


def _check_size(tensors: tuple[Tensor, ...], vector: Vector) -> None:
    if vector.dtype != np.float32 or vector.shape != (layout.size(tensors),):
        raise LocalError(error_texts.OTHER_SIZE(layout.size(tensors), vector.dtype, vector.shape))
