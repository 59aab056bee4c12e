"""Edge: a prepared worker: its model, its samples, and what it does with them, by its role."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from millpond.train import datasets, factory, flat, layout, loop, protocol, seeds
from millpond.train.datasets import DataError, Samples
from millpond.train.flat import Vector
from millpond.train.job import Job
from millpond.train.protocol import Initial, Prepare, Ready, Score, Trained
from millpond.train.stepper import Keeper, Stepper
from millpond.wire.channel import Buffer
from millpond.wire.message import Message, Ok

Answer = tuple[Message, Buffer]


class Session(Protocol):
    """One job on one worker."""

    def ready(self) -> Ready:
        """What was prepared."""

    def inlet(self, message: Message) -> Vector | None:
        """Where the payload of ``message`` goes, None for one without."""

    def answer(self, message: Message) -> Answer | None:
        """Do what it says; None if it is not for this role. Raises whatever the user's code may."""


def make(prepare: Prepare, root: Path, code_dir: Path) -> Session:
    """Build the model and load the samples. Raises LocalError, and what the user's code raises."""
    seeds.be_deterministic(prepare.job.train.threads)
    roles: dict[str, type[Rounds | Steps | Kept]] = {"rounds": Rounds, "steps": Steps, "keeper": Kept}
    return roles[prepare.role](prepare, root, code_dir)


class _HeldOut:
    """Samples to score a model on, read once."""

    def __init__(self, root: Path, job: Job) -> None:
        self._root, self._job = root, job
        self._samples: dict[str, Samples] = {}

    def __getitem__(self, folder: str) -> Samples:
        if folder not in self._samples:
            data = self._job.data
            self._samples[folder] = datasets.load(self._root, (folder,), data.format, data.classes)
        return self._samples[folder]


class Rounds:
    """Trains whole rounds."""

    def __init__(self, prepare: Prepare, root: Path, code_dir: Path) -> None:
        self._job, self._worker, self._code_dir = prepare.job, prepare.worker, code_dir
        self._model = factory.build(prepare.job.model, code_dir, prepare.job.seed)
        self._tensors = flat.describe(self._model)
        data = prepare.job.data
        self._samples = datasets.load(root, prepare.folders, data.format, data.classes)
        self._held_out = _HeldOut(root, prepare.job)
        self._vector = np.empty(layout.size(self._tensors), np.float32)

    def ready(self) -> Ready:
        """See Session."""
        return Ready(len(self._samples), self._tensors, len(self._vector))

    def inlet(self, message: Message) -> Vector | None:
        """See Session."""
        return self._vector if isinstance(message, (protocol.Train, protocol.Evaluate)) else None

    def answer(self, message: Message) -> Answer | None:
        """See Session."""
        if isinstance(message, protocol.GetInitial):
            return self._initial(), self._vector.data
        if isinstance(message, protocol.Train):
            return self._train(message.round), self._vector.data
        if isinstance(message, protocol.Evaluate):
            flat.write(self._model, self._vector)
            samples = self._held_out[message.folder]
            return Score(*loop.evaluate(self._model, samples), len(samples)), b""
        return None

    def _initial(self) -> Initial:
        """Built anew, so the same whenever it is asked for."""
        flat.read(factory.build(self._job.model, self._code_dir, self._job.seed), self._vector)
        return Initial()

    def _train(self, round_: int) -> Trained:
        if not len(self._samples):
            raise DataError(f"missing data: {self._worker} has no samples to train on")
        seed = seeds.derive(self._job.seed, self._worker, round_)
        flat.write(self._model, self._vector)
        loss, seconds = loop.train_round(self._model, self._samples, self._job.train, seed)
        flat.read(self._model, self._vector)
        return Trained(round_, len(self._samples), loss, seconds)


class Steps:
    """Computes gradients of steps."""

    def __init__(self, prepare: Prepare, root: Path, code_dir: Path) -> None:
        data = prepare.job.data
        parts = [datasets.load(root, (folder,), data.format, data.classes) for folder in prepare.folders]
        self._samples = tuple(len(part) for part in parts)
        self._shape = next((part.images.shape[1:] for part in parts if len(part)), ())
        self._stepper = Stepper(factory.build(prepare.job.model, code_dir, prepare.job.seed), parts)

    def ready(self) -> Ready:
        """See Session."""
        binding = self._stepper.binding
        size = len(binding.state)
        return Ready(sum(self._samples), binding.tensors, size, parts=self._samples, shape=self._shape)

    def inlet(self, message: Message) -> Vector | None:
        """See Session."""
        return self._stepper.binding.state if isinstance(message, protocol.Compute) else None

    def answer(self, message: Message) -> Answer | None:
        """See Session."""
        if isinstance(message, protocol.Compute):
            return self._stepper.compute(message), self._stepper.binding.sums.data
        return None


class Kept:
    """Keeps the model of a synchronous job, and scores it."""

    def __init__(self, prepare: Prepare, root: Path, code_dir: Path) -> None:
        self._model = factory.build(prepare.job.model, code_dir, prepare.job.seed)
        self._held_out = _HeldOut(root, prepare.job)
        self._keeper = Keeper(self._model, loop.make_optimizer(self._model, prepare.job.train))
        self._binding = self._keeper.binding
        self._restored = np.empty(0, np.float32)

    def ready(self) -> Ready:
        """See Session."""
        return Ready(0, self._binding.tensors, len(self._binding.state))

    def inlet(self, message: Message) -> Vector | None:
        """See Session."""
        if isinstance(message, protocol.Evaluate):
            return self._binding.state
        if isinstance(message, protocol.Apply):
            return self._binding.sums
        if isinstance(message, protocol.Restore):
            self._restored = np.empty(len(self._binding.state) + layout.size(message.tensors), np.float32)
            return self._restored
        return None

    def answer(self, message: Message) -> Answer | None:
        """See Session."""
        if isinstance(message, protocol.Apply):
            self._keeper.apply(message.factor)
            return protocol.Applied(), self._binding.state.data
        if isinstance(message, protocol.GetInitial):
            return Initial(), self._binding.state.data
        if isinstance(message, protocol.Evaluate):
            self._binding.loaded()
            samples = self._held_out[message.folder]
            return Score(*loop.evaluate(self._model, samples), len(samples)), b""
        if isinstance(message, protocol.GetMomentum):
            tensors, values = self._keeper.momentum()
            return protocol.Momentum(tensors, len(values)), values.data
        if isinstance(message, protocol.Restore):
            return self._restore(message), b""
        return None

    def _restore(self, request: protocol.Restore) -> Ok:
        size = len(self._binding.state)
        self._binding.state[:] = self._restored[:size]
        self._keeper.restore(request.tensors, self._restored[size:])
        return Ok()
