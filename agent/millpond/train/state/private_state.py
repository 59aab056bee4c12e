# SPDX-License-Identifier: Apache-2.0
"""Edge: the state that a task keeps on its device, between the exchanges and restarts of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from safetensors.torch import load_file, save_file

from millpond.base.errors import LocalError
from millpond.linux.files import replace_durably
from millpond.linux.progress import reading

_FILE = "state.safetensors"
UNFIT = "the state that the task has kept does not fit it any more: give the job another name"


class Stateful(Protocol):
    """An object whose state is tensors by name, such as a torch module."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take a state that ``state_dict`` has returned."""


class PrivateState:
    """Keeps the state of ``stateful`` in ``folder``. Raises LocalError for a state that is not of tensors."""

    def __init__(self, stateful: Stateful, folder: Path) -> None:
        self._stateful, self._path = stateful, folder / _FILE
        self._tensors()
        if not self._path.exists():
            return
        try:
            stateful.load_state_dict(load_file(self._path))
        except (OSError, safetensors.SafetensorError) as error:
            raise LocalError(f"the task's state cannot be read: {error}") from None
        except RuntimeError as error:  # of torch's modules, for other tensors than theirs
            raise LocalError(UNFIT) from error

    def save(self) -> None:
        """Write the present state, in place of the last one. Raises LocalError."""
        new = self._path.with_name(f".{_FILE}.new")
        try:
            with reading():  # a process that waits for a slow flash is not hung
                save_file(self._tensors(), new)
                replace_durably(new, self._path)
        except (OSError, safetensors.SafetensorError) as error:
            raise LocalError(f"the task's state cannot be written: {error}") from None

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = self._stateful.state_dict()
        if not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise LocalError("the task's state must have a state_dict of tensors by name")
        return {name: value.detach().clone().contiguous() for name, value in found.items()}
