# SPDX-License-Identifier: Apache-2.0
"""Edge: a model's first values from safetensors files: millpond's, or Hugging Face's, which may be several
with an index.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

from millpond.base.errors import LocalError
from millpond.train.job.first_values import shards_of

_ROUNDING = 1e-3
"""Of a tensor's largest value, by how much processors may differ that round random values otherwise."""


def load(model: nn.Module, path: Path) -> str:
    """Take the tensors of a file into the model, by name. Returns a line of text about those that only one of
    the two has. Raises LocalError for a file that has none of the model's tensors, or one of another shape.
    """
    found: dict[str, torch.Tensor] = {}
    for part in [path.parent / name for name in shards_of(path)] or [path]:
        found |= _read(part)
    own = model.state_dict()
    used = [name for name in own if name in found]
    if not used:
        raise LocalError(
            f"task: initial: {path.name} has no tensor of the model, such as {min(own, default='')}"
        )
    for name in used:
        if found[name].shape != own[name].shape:
            shapes = f"{tuple(found[name].shape)}, the model's is {tuple(own[name].shape)}"
            raise LocalError(f"task: initial: {name} in {path.name} is {shapes}")
    with torch.no_grad():
        for name in used:
            own[name].copy_(found[name])
    # Parameters with two names are in files of Hugging Face's under one.
    filled = {own[name].data_ptr() for name in used}
    missing = [name for name in own if name not in found and own[name].data_ptr() not in filled]
    return _described(path.name, len(used), sorted(missing), sorted(found.keys() - own.keys()))


def take_rounded(model: nn.Module, path: Path, names: AbstractSet[str]) -> str:
    """Take the tensors with these ``names`` from a file, as long as each differs from the model's by rounding
    alone. Returns the name of the first that does not, "" if there is none. Raises LocalError.
    """
    found, own = _read(path), model.state_dict()
    for name in sorted(found.keys() & own.keys() & names):
        if not _near(found[name], own[name]):
            return name
        with torch.no_grad():
            own[name].copy_(found[name])
    return ""


def _near(value: torch.Tensor, built: torch.Tensor) -> bool:
    if value.shape != built.shape or value.dtype != built.dtype:
        return False
    if not (built.is_floating_point() or built.is_complex()):
        return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (value, built)))
    rounding = max(_ROUNDING, torch.finfo(built.dtype).eps)
    wide = torch.complex128 if built.is_complex() else torch.float64
    value, built = value.to(wide), built.detach().to(wide)
    finite = built[built.isfinite()].abs()
    most = rounding * finite.max() if len(finite) else 0.0
    same = (value == built) | (value.isnan() & built.isnan()) | ((value - built).abs() <= most)
    return bool(same.all())


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise LocalError(f"task: initial: {path.name} cannot be read: {error}") from None


def _described(file: str, used: int, missing: list[str], unused: list[str]) -> str:
    text = f"{used} tensors of the model are from {file}"
    if missing:
        text += f"; {len(missing)} are not in it, such as {missing[0]}"
    if unused:
        text += f"; {len(unused)} of it are not in the model, such as {unused[0]}"
    return text
