# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the processor or GPU that a worker on the host computes with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from millpond.base.errors import LocalError

Accelerator = Literal["auto", "cpu", "cuda"]


def place(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Move a model to the first GPU if there is one ("auto"), or there must be one ("cuda"). Raises
    LocalError.
    """
    if accelerator == "cpu":
        return model
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS has no deterministic algorithms
    if torch.cuda.is_available():
        # The loss of segmentation, for one, has no deterministic algorithm there, and would be refused.
        torch.use_deterministic_algorithms(True, warn_only=True)
        return model.to("cuda")
    if accelerator == "cuda":
        raise LocalError('host: accelerator: "cuda" is wanted, and torch finds no GPU')
    return model


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, the processor for a model without any."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch, a tree of tensors, on a device."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(item, device) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(item, device) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(item, device) for item in batch)
    return batch
