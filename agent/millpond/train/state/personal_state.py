# SPDX-License-Identifier: Apache-2.0
"""Edge: the personal state of a worker: local layers and a personal model, which never leave its machine.

A round can be asked for twice: it did not count, or the host or the device broke off in it. So what was
before the last round is kept, too, and the same round begins with the same values again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from millpond.base.errors import LocalError
from millpond.linux.progress import reading
from millpond.train import error_texts
from millpond.train.state import checkpoint, layout
from millpond.train.state.checkpoint import Checkpoint
from millpond.train.state.flat import Vector
from millpond.train.state.layout import Tensor


class PersonalState:
    """Keeps vectors [size] laid out as ``tensors`` after the last two exchanges of ``run``, in ``folder``, or
    in memory alone without one. The folder may hold those of another run until the first is kept: they make
    way, and that run does not begin anew unnoticed. Raises LocalError for that, and for a file that cannot be
    read, or is of other tensors.
    """

    def __init__(self, tensors: tuple[Tensor, ...], run: str = "", folder: Path | None = None) -> None:
        self._tensors, self._run, self._folder = tensors, run, folder
        # A host may call its run anything.
        self._name = f"personal-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
        self._kept: dict[int, Vector] = {}
        for path in folder.glob(f"{self._name}-*.safetensors") if folder else ():
            found = _load(path)
            if found.tensors != tensors:
                raise LocalError(error_texts.DAMAGED_STATE())
            self._kept[found.round] = found.vector
        if folder and not self._kept and (folder / _marker(self._name)).exists():
            raise LocalError(error_texts.LOST_STATE())

    def after(self, exchange: int) -> Vector | None:
        """Return the newest vector of an exchange up to this one, None without any."""
        numbers = [number for number in self._kept if number <= exchange]
        return self._kept[max(numbers)] if numbers else None

    def keep(self, exchange: int, vector: Vector) -> None:
        """Keep the vector after an exchange. One with parameters that are not finite is of no use, and is not
        kept. Raises LocalError.
        """
        places = layout.spans(self._tensors)
        if not all(np.isfinite(vector[span]).all() for tensor, span in places if not tensor.buffer):
            return
        before = max((number for number in self._kept if number < exchange), default=None)
        self._kept = {number: kept for number, kept in self._kept.items() if number == before}
        self._kept[exchange] = vector
        if self._folder:
            with reading():  # a process that waits for a slow flash is not hung
                self._write(self._folder, exchange)

    def _write(self, folder: Path, exchange: int) -> None:
        places = {number: folder / f"{self._name}-{number:09d}.safetensors" for number in self._kept}
        try:
            checkpoint.save(
                places[exchange], Checkpoint(self._kept[exchange], self._tensors, self._run, exchange)
            )
            for old in {*folder.glob("personal-*.safetensors")} - {*places.values()}:
                if not old.name.startswith(f"{self._name}-"):
                    (folder / _marker(old.name.rpartition("-")[0])).touch()
                old.unlink(missing_ok=True)
        except (LocalError, OSError) as error:
            raise LocalError(error_texts.UNKEPT_STATE()) from error


def _marker(name: str) -> str:
    return f"{name}.gone"


def _load(path: Path) -> Checkpoint:
    try:
        with reading():
            return checkpoint.load(path)
    except LocalError as error:
        raise LocalError(error_texts.DAMAGED_STATE()) from error
