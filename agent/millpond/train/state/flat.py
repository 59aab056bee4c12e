# SPDX-License-Identifier: Apache-2.0
"""Pure: a model's state as one flat float32 vector, and back.

float32, float16 and bfloat16 survive the way there and back bit by bit. Whole numbers up to 2**24 do as well;
an average of them is rounded to the nearest. float64 would lose bits and is refused.
"""

from __future__ import annotations

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
    """Return the layout of a model's state. Raises LocalError for tensors that float32 cannot carry."""
    tensors = tuple(_describe(name, value) for name, value in model.state_dict().items())
    if layout.size(tensors) == 0:
        raise LocalError("the model has no parameters")
    return tensors


def _describe(name: str, value: object) -> Tensor:
    if not isinstance(value, torch.Tensor):
        raise LocalError(f"the model's state '{name}' is a {type(value).__name__}, not a tensor")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in layout.FLOATS + layout.INTEGERS:
        hint = "; call .float() on the model" if dtype == "float64" else ""
        raise LocalError(f"the model's tensor '{name}' is {dtype}, which float32 cannot carry{hint}")
    return Tensor(name, tuple(value.shape), dtype)


def read(model: nn.Module, out: Vector) -> None:
    """Copy the model's state into ``out`` [size]. Raises LocalError, also for whole numbers over 2**24."""
    tensors = describe(model)
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
