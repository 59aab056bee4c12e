# SPDX-License-Identifier: Apache-2.0
"""Edge (a thread): checkpoints of a job, written while the job trains."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millpond.aggregate.kernels import Vector
from millpond.base import schema
from millpond.base.errors import ConfigError, LocalError
from millpond.host.jobs.job_folder import BEST
from millpond.host.jobs.training.scores import Best
from millpond.host.jobs.training.shards import EpochPosition
from millpond.train.state import checkpoint, layout
from millpond.train.state.checkpoint import Checkpoint
from millpond.train.state.layout import Tensor

_OPTIMIZER = "optimizer:"
STAGED = "best-of-{}.safetensors"
"""A model whose round is about to be recorded as the best, or was the best before."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of a job at a checkpoint: ``step`` steps are done. For the present epoch: ``place`` is the
    position in the data, ``counted`` the samples that went into the model by worker, ``loss`` their summed
    loss and ``loss_count`` its count, ``seconds`` the time taken.
    The checkpoint file holds these field names.
    """

    step: int
    place: EpochPosition
    counted: dict[str, int]
    loss: float
    seconds: float
    loss_count: float


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint: the model's state float32 [size], the optimizer's tensors, the progress."""

    state: Vector
    momentum_tensors: tuple[Tensor, ...]
    momentum: Vector
    progress: TrainingProgress


class CheckpointWriter:
    """Writes checkpoints of a job to ``directory``. The newest file is whole whenever a write is cut.
    ``recorded`` is the number of steps before the newest: at first of the one behind which the job has
    resumed.
    """

    def __init__(self, directory: Path, job: str, tensors: tuple[Tensor, ...], log: logging.Logger) -> None:
        self._directory, self._job, self._tensors, self._log = directory, job, tensors, log
        self.recorded = 0
        self._rounds = (0, 0)  # before the last two
        self._thread: threading.Thread | None = None
        for part in directory.glob(".step-*.part"):  # left by a daemon that was killed
            part.unlink(missing_ok=True)

    @property
    def busy(self) -> bool:
        """Whether the last checkpoint is still being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def final_round(self) -> int:
        """The last round that no job computes again which resumes behind one of the last two checkpoints."""
        return self._rounds[0]

    def save(self, saved: SavedCheckpoint) -> None:
        """Begin to write ``saved``, which must not change any more. The previous write must have ended."""
        self._thread = threading.Thread(target=self._try_to_write, args=(saved,), daemon=True)
        self._thread.start()

    def save_now(self, saved: SavedCheckpoint) -> None:
        """Write ``saved`` before this returns; older ones stay until ``prune``. Raises LocalError."""
        self.wait()
        self._write(saved)

    def prune(self, keep: int = 2) -> None:
        """Remove all checkpoints but the newest ``keep``: while a job trains there is one before the newest,
        which may turn out to be damaged.
        """
        for old in _checkpoint_files(self._directory)[:-keep]:
            old.unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread:
            self._thread.join()

    def _try_to_write(self, saved: SavedCheckpoint) -> None:
        try:
            self._write(saved)
        except LocalError as error:  # a full disk, most likely: the job goes on, and the last one stays
            self._log.warning("%s", error)
            return
        self.prune()

    def _write(self, saved: SavedCheckpoint) -> None:
        named = tuple(Tensor(_OPTIMIZER + t.name, t.shape, t.dtype) for t in saved.momentum_tensors)
        path = self._directory / f"step-{saved.progress.step:09d}.safetensors"
        about = {"progress": json.dumps(schema.dump(saved.progress))}
        vector = np.concatenate([saved.state, saved.momentum]) if len(saved.momentum) else saved.state
        whole = Checkpoint(vector, self._tensors + named, self._job, saved.progress.place.epoch, about)
        checkpoint.save(path, whole)
        self.recorded = saved.progress.step
        self._rounds = self._rounds[1], saved.progress.place.epoch - 1


class BestModel:
    """Keeps the ``best`` model of a job's recorded rounds in its place. The one before it is kept, too, until
    its round is the ``final`` one, or before it: no job that resumes computes that again.
    """

    def __init__(self, directory: Path, best: Best | None) -> None:
        self._directory, self._place = directory, directory / BEST
        self._best: Best | None = None
        self.settle(best, 0)
        if not best:
            self._place.unlink(missing_ok=True)
        self._drop(after=best.round if best else 0)

    def settle(self, best: Best | None, final: int) -> None:
        """Put the best model in its place once its round is recorded."""
        if best and (staged := self._staged(best)).exists():
            if self._best and self._place.exists():
                self._place.replace(self._staged(self._best))
            staged.replace(self._place)
        self._best = best
        if best and best.round <= final:
            self.end()

    def end(self) -> None:
        """Keep the best model alone."""
        self._drop(after=0)

    def _staged(self, best: Best) -> Path:
        return self._directory / STAGED.format(best.round)

    def _drop(self, after: int) -> None:
        """Remove the other models, of rounds ``after`` that one."""
        for other in self._directory.glob(STAGED.format("*")):
            if int(other.stem.rpartition("-")[2]) > after:
                other.unlink(missing_ok=True)


def newest(
    directory: Path, tensors: tuple[Tensor, ...], recorded: int, log: logging.Logger
) -> SavedCheckpoint | None:
    """Return a job's newest checkpoint before which no epoch lies that is not ``recorded``; None without one.
    One that cannot be read is passed over. Raises LocalError if none can be read.
    """
    fault: LocalError | None = None
    for path in reversed(_checkpoint_files(directory)):
        try:
            saved = _load(path, tensors)
        except LocalError as error:
            fault = fault or error
            continue
        if saved.progress.place.epoch <= recorded + 1:
            if fault:
                log.warning("%s; the one before it serves", fault)
            return saved
    if fault:
        raise fault
    return None


def _load(path: Path, tensors: tuple[Tensor, ...]) -> SavedCheckpoint:
    found = checkpoint.load(path)
    try:
        progress = schema.load(TrainingProgress, json.loads(found.about["progress"]), "progress")
    except (KeyError, ValueError, ConfigError):
        raise LocalError(f"{path} is not a checkpoint of a job") from None
    own, others = found.tensors[: len(tensors)], found.tensors[len(tensors) :]
    if own != tensors or not all(t.name.startswith(_OPTIMIZER) for t in others):
        raise LocalError(f"{path} is a checkpoint of another model")
    size = layout.size(own)
    momentum = tuple(Tensor(t.name.removeprefix(_OPTIMIZER), t.shape, t.dtype) for t in others)
    return SavedCheckpoint(found.vector[:size], momentum, found.vector[size:], progress)


def _checkpoint_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*.safetensors"))
