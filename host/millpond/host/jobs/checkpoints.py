# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): checkpoints of a synchronous job, written while the job trains."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millpond.base import schema
from millpond.base.errors import ConfigError, LocalError
from millpond.host.jobs.synchronous.shards import EpochPosition
from millpond.train.reduce.exact import Vector
from millpond.train.state import checkpoint, layout
from millpond.train.state.checkpoint import Checkpoint
from millpond.train.state.layout import Tensor

_OPTIMIZER = "optimizer:"


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of a job at a checkpoint: ``step`` steps are done. For the present epoch: ``place`` is the
    position in the data, ``counted`` the samples that went into the model by worker, ``loss`` their summed
    loss, ``seconds`` the time taken. The checkpoint file holds these field names.
    """

    step: int
    place: EpochPosition
    counted: dict[str, int]
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint: the model's state float32 [size], the optimizer's tensors, the progress."""

    state: Vector
    momentum_tensors: tuple[Tensor, ...]
    momentum: Vector
    progress: TrainingProgress


class CheckpointWriter:
    """Writes checkpoints of a job to ``directory``. The newest file is whole whenever a write is cut."""

    def __init__(self, directory: Path, job: str, tensors: tuple[Tensor, ...], log: logging.Logger) -> None:
        self._directory, self._job, self._tensors, self._log = directory, job, tensors, log
        self._thread: threading.Thread | None = None
        for part in directory.glob(".step-*.part"):  # left by a daemon that was killed
            part.unlink(missing_ok=True)

    @property
    def busy(self) -> bool:
        """Whether the last checkpoint is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, saved: SavedCheckpoint) -> None:
        """Begin to write ``saved``, which must not change any more. The previous write must have ended."""
        self._thread = threading.Thread(target=self._write, args=(saved,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread:
            self._thread.join()

    def clear(self) -> None:
        """Remove all checkpoints of a job that has ended well."""
        self.wait()
        for path in _checkpoint_files(self._directory):
            path.unlink(missing_ok=True)

    def _write(self, saved: SavedCheckpoint) -> None:
        named = tuple(Tensor(_OPTIMIZER + t.name, t.shape, t.dtype) for t in saved.momentum_tensors)
        path = self._directory / f"step-{saved.progress.step:09d}.safetensors"
        about = {"progress": json.dumps(schema.dump(saved.progress))}
        whole = Checkpoint(
            np.concatenate([saved.state, saved.momentum]),
            self._tensors + named,
            self._job,
            saved.progress.place.epoch,
            about,
        )
        try:
            checkpoint.save(path, whole)
        except (
            LocalError
        ) as error:  # a full disk, most likely: the job goes on, and the last checkpoint stays
            self._log.warning("%s", error)
            return
        for old in _checkpoint_files(self._directory):
            if old != path:
                old.unlink(missing_ok=True)


def newest(directory: Path, tensors: tuple[Tensor, ...]) -> SavedCheckpoint | None:
    """Return a job's newest checkpoint, None without one. Raises LocalError if it is of another model."""
    paths = _checkpoint_files(directory)
    if not paths:
        return None
    found = checkpoint.load(paths[-1])
    try:
        progress = schema.load(TrainingProgress, json.loads(found.about["progress"]), "progress")
    except (KeyError, ValueError, ConfigError):
        raise LocalError(f"{paths[-1]} is not a checkpoint of a synchronous job") from None
    own, others = found.tensors[: len(tensors)], found.tensors[len(tensors) :]
    if own != tensors or not all(t.name.startswith(_OPTIMIZER) for t in others):
        raise LocalError(f"{paths[-1]} is a checkpoint of another model")
    size = layout.size(own)
    momentum = tuple(Tensor(t.name.removeprefix(_OPTIMIZER), t.shape, t.dtype) for t in others)
    return SavedCheckpoint(found.vector[:size], momentum, found.vector[size:], progress)


def _checkpoint_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*.safetensors"))
