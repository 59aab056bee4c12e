# SPDX-License-Identifier: Apache-2.0
"""Edge: the state that a task keeps on its device, between the exchanges and restarts of a job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from safetensors.torch import load_file, save_file

from millpond.base.errors import LocalError
from millpond.linux.files import replace_durably
from millpond.linux.progress import reading
from millpond.train import error_texts

_FILE, _BEFORE, _LATEST = "state.safetensors", "state-before.safetensors", "state-latest.safetensors"

_Tensors = dict[str, torch.Tensor]


class _Unreadable(LocalError):
    """A file that is not whole."""


class Stateful(Protocol):
    """An object whose state is tensors by name, such as a torch module."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take a state that ``state_dict`` has returned."""


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        with reading():  # a process that waits for a slow flash is not hung
            yield
    except (OSError, safetensors.SafetensorError) as error:
        raise LocalError(f"the task's state cannot be written: {error}") from None


class PrivateState:
    """Keeps the state of ``stateful`` in ``folder``: that of the last two exchanges of a ``run`` that its
    host has recorded, and the latest. A host resumes behind an exchange that it has recorded, and an exchange
    can be asked for again, with the same seed: tasks of one asynchronous exchange differ in it. Raises
    LocalError for a state that is not of tensors.
    """

    def __init__(self, stateful: Stateful, folder: Path, run: str = "") -> None:
        self._stateful, self._run = stateful, run
        self._path, self._before, self._latest = (folder / name for name in (_FILE, _BEFORE, _LATEST))
        self._first = self._now = self._tensors()
        self._began: _Tensors | None = None  # what the last exchange has begun with, if in this process
        self._exchange, self._seeds, self._recorded, self._behind = 0, list[int](), 0, 0
        if not self._path.exists() and self._before.exists():  # it was ended between the two files
            self._before.replace(self._path)
        if self._path.exists():
            self._exchange, self._seeds = self._load(self._path)
            self._recorded = self._exchange
        self._is_ahead = False  # whether the latest is newer than what is recorded
        if self._latest.exists():
            with contextlib.suppress(_Unreadable):  # nobody has waited until the flash had it
                self._exchange, self._seeds = self._load(self._latest)
                self._is_ahead = True

    def begin(self, exchange: int, seed: int, recorded: int | None = None) -> None:
        """Begin an exchange, before which the host has ``recorded`` that one last, by default the one before.
        Goes back if it is asked for again, and in a new process to what was recorded. Raises LocalError.
        """
        behind = self._behind = exchange - 1 if recorded is None else recorded
        again = exchange == self._exchange and seed in self._seeds
        if again and seed == self._seeds[-1] and self._began is not None:
            self._take(self._began)
        elif again or (self._began is None and behind < self._exchange != exchange):
            self._go_back(behind)
            self._exchange, self._seeds = exchange, []
        elif self._is_ahead and self._exchange <= behind:
            with _writing():  # this worker had no task in the recorded exchange, or in another run its last
                self._keep(self._latest, self._exchange)
        self._began = self._now

    def _go_back(self, behind: int) -> None:
        """Take the newest recorded state of exchanges up to ``behind``, and drop those after it."""
        self._latest.unlink(missing_ok=True)
        self._is_ahead = False
        if self._recorded > behind and not self._before.exists():
            self._path.unlink()
        elif self._recorded > behind:
            self._before.replace(self._path)
        if self._path.exists():
            self._recorded, _ = self._load(self._path)
        else:
            self._recorded = 0
            self._take(self._first)

    def _take(self, tensors: _Tensors) -> None:
        self._stateful.load_state_dict({name: value.clone() for name, value in tensors.items()})
        self._now = tensors

    def _load(self, path: Path) -> tuple[int, list[int]]:
        """Take the state in a file. Returns the exchange of this run that led to it, 0 of another run, and
        the seeds of its tasks.
        """
        try:
            with safetensors.safe_open(path, "pt") as file:
                about = file.metadata() or {}
            self._take(load_file(path))
        except (OSError, safetensors.SafetensorError) as error:
            raise _Unreadable(f"the task's state cannot be read: {error}") from None
        except RuntimeError as error:  # of torch's modules, for other tensors than theirs
            raise LocalError(error_texts.UNFIT_STATE()) from error
        if about.get("run") != self._run:
            return 0, []
        return int(about.get("exchange", 0)), [int(seed) for seed in about.get("seeds", "").split()]

    def restore(self) -> None:
        """Undo what has changed since the last exchange: made-up samples, and scores, teach nothing."""
        self._take(self._now)

    def save(self, exchange: int, seed: int, *, records: bool = True) -> None:
        """Write the state after an exchange; it is on the flash when this returns if the host ``records`` the
        exchange. Raises LocalError.
        """
        new = self._path.with_name(f".{_FILE}.new")
        before = self._seeds if exchange == self._exchange else []
        seeds = before if before[-1:] == [seed] else [*before, seed]
        about = {"run": self._run, "exchange": str(exchange), "seeds": " ".join(map(str, seeds))}
        with _writing():
            tensors = self._tensors()
            save_file(tensors, new, about)
            self._latest.unlink(missing_ok=True)
            if records:
                self._keep(new, exchange)
            else:
                new.replace(self._latest)  # in place of another, ext4 would begin to write it
                self._is_ahead = True
        self._exchange, self._seeds, self._now = exchange, seeds, tensors

    def _keep(self, file: Path, exchange: int) -> None:
        """Make a file the newest recorded state, in place of one that the host could not record after all.
        Raises OSError.
        """
        if exchange != self._recorded <= self._behind and self._path.exists():
            self._path.replace(self._before)
        replace_durably(file, self._path)
        self._recorded, self._is_ahead = exchange, False

    def _tensors(self) -> _Tensors:
        found = self._stateful.state_dict()
        if not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise LocalError(error_texts.NO_STATE())
        return {name: value.detach().clone().contiguous() for name, value in found.items()}
