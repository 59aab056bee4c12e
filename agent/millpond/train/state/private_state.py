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

_FILE, _BEFORE = "state.safetensors", "state-before.safetensors"
UNFIT = "the state that the task has kept does not fit it any more: give the job another name"


class Stateful(Protocol):
    """An object whose state is tensors by name, such as a torch module."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take a state that ``state_dict`` has returned."""


class PrivateState:
    """Keeps the state of ``stateful`` in ``folder``, and the one before the last exchange: that can be asked
    for again in a ``run``, with the same seed: tasks of one asynchronous exchange differ in it. Raises
    LocalError for a state that is not of tensors.
    """

    def __init__(self, stateful: Stateful, folder: Path, run: str = "") -> None:
        self._stateful, self._path, self._before, self._run = stateful, folder / _FILE, folder / _BEFORE, run
        self._first, self._last = self._tensors(), (0, 0)
        """The exchange and the seed that led to the newer file."""
        if not self._path.exists() and self._before.exists():  # it was ended between the two files
            self._before.replace(self._path)
        if self._path.exists():
            self._last = self._load(self._path)

    def begin(self, exchange: int, seed: int) -> None:
        """Go back to the state before the last exchange, if it is asked for again. Raises LocalError."""
        if (exchange, seed) != self._last:
            return
        if self._before.exists():
            self._load(self._before)
        else:
            self._stateful.load_state_dict(self._first)

    def _load(self, path: Path) -> tuple[int, int]:
        try:
            with safetensors.safe_open(path, "pt") as file:
                about = file.metadata() or {}
            self._stateful.load_state_dict(load_file(path))
        except (OSError, safetensors.SafetensorError) as error:
            raise LocalError(f"the task's state cannot be read: {error}") from None
        except RuntimeError as error:  # of torch's modules, for other tensors than theirs
            raise LocalError(UNFIT) from error
        same = about.get("run") == self._run
        return (int(about.get("exchange", 0)), int(about.get("seed", 0))) if same else (0, 0)

    def save(self, exchange: int, seed: int) -> None:
        """Write the state after an exchange. Raises LocalError."""
        new = self._path.with_name(f".{_FILE}.new")
        about = {"run": self._run, "exchange": str(exchange), "seed": str(seed)}
        try:
            with reading():  # a process that waits for a slow flash is not hung
                save_file(self._tensors(), new, about)
                if (exchange, seed) != self._last and self._path.exists():
                    self._path.replace(self._before)
                replace_durably(new, self._path)
        except (OSError, safetensors.SafetensorError) as error:
            raise LocalError(f"the task's state cannot be written: {error}") from None
        self._last = exchange, seed

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = self._stateful.state_dict()
        if not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise LocalError("the task's state must have a state_dict of tensors by name")
        return {name: value.detach().clone().contiguous() for name, value in found.items()}
