# SPDX-License-Identifier: Apache-2.0
"""Edge: a model's first values from a safetensors file: a checkpoint of millpond's or of Hugging Face's."""

from __future__ import annotations

from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

from millpond.base.errors import LocalError


def load(model: nn.Module, path: Path) -> str:
    """Take the tensors of a file into the model, by name. Returns a line of text about those that only one of
    the two has. Raises LocalError for a file that has none of the model's tensors, or one of another shape.
    """
    try:
        found = load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise LocalError(f"task: initial: {path.name} cannot be read: {error}") from None
    own = model.state_dict()
    used = found.keys() & own.keys()
    if not used:
        raise LocalError(
            f"task: initial: {path.name} has no tensor of the model, such as {min(own, default='')}"
        )
    for name in sorted(used):
        if found[name].shape != own[name].shape:
            shapes = f"{tuple(found[name].shape)}, the model's is {tuple(own[name].shape)}"
            raise LocalError(f"task: initial: {name} in {path.name} is {shapes}")
    with torch.no_grad():
        for name in used:
            own[name].copy_(found[name])
    return _described(path.name, len(used), sorted(own.keys() - used), sorted(found.keys() - used))


def _described(file: str, used: int, missing: list[str], unused: list[str]) -> str:
    text = f"{used} tensors of the model are from {file}"
    if missing:
        text += f"; {len(missing)} are not in it, such as {missing[0]}"
    if unused:
        text += f"; {len(unused)} of it are not in the model, such as {unused[0]}"
    return text
