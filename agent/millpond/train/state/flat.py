# SPDX-License-Identifier: Apache-2.0
"""Pure: the exchanged part of a model's state as one flat float32 vector: all but frozen parameters.

float32, float16 and bfloat16 survive the way there and back bit by bit. Whole numbers up to 2**24 do as well;
an average of them is rounded to the nearest. float64 would lose bits and is refused.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from millpond.base.errors import LocalError
from millpond.train.state import layout
from millpond.train.state.layout import Tensor

_EXACT = 1 << 24
Vector = NDArray[np.float32]


def describe(model: nn.Module) -> tuple[Tensor, ...]:
    """Return the layout of a model's state without its frozen parameters. Raises LocalError for tensors that
    float32 cannot carry.
    """
    left_out = frozen_names(model)
    named = model.state_dict().items()
    tensors = tuple(_describe(name, value) for name, value in named if name not in left_out)
    if layout.size(tensors) == 0:
        raise LocalError("the model has no parameter that may be trained")
    return tensors


def describe_frozen(model: nn.Module) -> tuple[Tensor, ...]:
    """Return the layout of a model's frozen parameters. Raises LocalError as ``describe``."""
    frozen = frozen_names(model)
    return tuple(_describe(name, value) for name, value in model.state_dict().items() if name in frozen)


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that may not be trained."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def checksum(model: nn.Module) -> int:
    """Return a checksum of the names and bits of a model's frozen parameters, 0 without any."""
    found = 0
    for name in sorted(frozen_names(model)):
        value = model.get_parameter(name).detach().cpu().contiguous()
        found = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), found))
    return found


def _describe(name: str, value: object) -> Tensor:
    if not isinstance(value, torch.Tensor):
        raise LocalError(f"the model's state '{name}' is a {type(value).__name__}, not a tensor")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in layout.FLOATS + layout.INTEGERS:
        hint = "; call .float() on the model" if dtype == "float64" else ""
        raise LocalError(f"the model's tensor '{name}' is {dtype}, which float32 cannot carry{hint}")
    return Tensor(name, tuple(value.shape), dtype)


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
