# SPDX-License-Identifier: Apache-2.0
"""Edge: a model's first values from safetensors files: millpond's, or Hugging Face's, which may be several
with an index.
"""

from __future__ import annotations

from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

from millpond.base.errors import LocalError
from millpond.train.job.first_values import shards_of


def load(model: nn.Module, path: Path) -> str:
    """Take the tensors of a file into the model, by name. Returns a line of text about those that only one of
    the two has. Raises LocalError for a file that has none of the model's tensors, or one of another shape.
    """
    found: dict[str, torch.Tensor] = {}
    for part in [path.parent / name for name in shards_of(path)] or [path]:
        try:
            found |= load_file(part)
        except (OSError, safetensors.SafetensorError) as error:
            raise LocalError(f"task: initial: {part.name} cannot be read: {error}") from None
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


def _described(file: str, used: int, missing: list[str], unused: list[str]) -> str:
    text = f"{used} tensors of the model are from {file}"
    if missing:
        text += f"; {len(missing)} are not in it, such as {missing[0]}"
    if unused:
        text += f"; {len(unused)} of it are not in the model, such as {unused[0]}"
    return text
