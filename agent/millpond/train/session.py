"""Edge: a prepared worker: its model, its samples, and what it does with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from millpond.train import datasets, factory, flat, layout, loop, seeds
from millpond.train.datasets import DataError, Samples
from millpond.train.protocol import Initial, Prepare, Ready, Score, Trained


class Session:
    """One job on one worker. ``vector`` is the state as it is received and sent, float32 [size]."""

    def __init__(self, prepare: Prepare, root: Path, code_dir: Path) -> None:
        """Build the model and load the samples. Raises LocalError, and what the user's code raises."""
        seeds.be_deterministic()
        self._job, self._worker, self._root, self._code_dir = prepare.job, prepare.worker, root, code_dir
        self._model = factory.build(prepare.job.model, code_dir, prepare.job.seed)
        self._tensors = flat.describe(self._model)
        self._samples = self._load(prepare.folders)
        self._held_out: dict[str, Samples] = {}
        self.vector = np.empty(layout.size(self._tensors), np.float32)

    def _load(self, folders: tuple[str, ...]) -> Samples:
        return datasets.load(self._root, folders, self._job.data.format, self._job.data.classes)

    def ready(self) -> Ready:
        """What was prepared."""
        return Ready(len(self._samples), self._tensors, len(self.vector))

    def initial(self) -> Initial:
        """Put the seeded initial state into ``vector``; built anew, so the same whenever it is asked for."""
        flat.read(factory.build(self._job.model, self._code_dir, self._job.seed), self.vector)
        return Initial()

    def train(self, round_: int) -> Trained:
        """One round from ``vector``, which then holds the result."""
        if not len(self._samples):
            raise DataError(f"missing data: {self._worker} has no samples to train on")
        seed = seeds.derive(self._job.seed, self._worker, round_)
        flat.write(self._model, self.vector)
        loss, seconds = loop.train_round(self._model, self._samples, self._job.train, seed)
        flat.read(self._model, self.vector)
        return Trained(round_, len(self._samples), loss, seconds)

    def evaluate(self, folder: str) -> Score:
        """The score of ``vector`` on the samples of ``folder``, which are read once."""
        if folder not in self._held_out:
            self._held_out[folder] = self._load((folder,))
        samples = self._held_out[folder]
        flat.write(self._model, self.vector)
        accuracy, loss = loop.evaluate(self._model, samples)
        return Score(accuracy, loss, len(samples))
