"""Edge: a prepared worker: its model, its samples, and what it does with them, by its role."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from millpond.base.errors import LocalError
from millpond.linux import memory
from millpond.train import protocol
from millpond.train.data import samples
from millpond.train.data.errors import DataError
from millpond.train.data.samples import Samples
from millpond.train.determinism import generators, seeds
from millpond.train.job.spec import Job
from millpond.train.local import training
from millpond.train.protocol import Initial, PrepareWorker, Ready, Score, Trained
from millpond.train.state import flat, layout
from millpond.train.state.flat import Vector
from millpond.train.state.flat_parameters import CHANGED, FlatParameters
from millpond.train.sync.gradients import GradientWorker, ServerOptimizer
from millpond.train.worker import user_code
from millpond.wire.channel import Buffer
from millpond.wire.messages import Message, Ok

Answer = tuple[Message, Buffer]


class WorkerRole(Protocol):
    """One job on one worker."""

    def ready(self) -> Ready:
        """What was prepared."""

    def inlet(self, message: Message, /) -> Vector | None:
        """Where the payload of ``message`` goes, None for one without."""

    def answer(self, message: Message) -> Answer | None:
        """Do what it says; None if it is not for this role. Raises whatever the user's code may."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Of the memory that synchronous jobs share: where the keeper's states lie, which others read, and where
    sums do, which only this worker shares.
    """

    states: int
    sums: int


def make(prepare: PrepareWorker, root: Path, code_dir: Path, shared: Descriptors | None) -> WorkerRole:
    """Build the model and load the samples. Raises LocalError, and what the user's code raises."""
    generators.diverge()
    generators.be_deterministic(prepare.job.train.threads)
    if prepare.role == "rounds":
        return FederatedRole(prepare, root, code_dir)
    if shared is None:
        raise LocalError("this worker has no shared memory for a synchronous job")
    if prepare.states < 1:
        raise LocalError(f"shared memory for {prepare.states} states is wanted")
    model = user_code.build(prepare.job.model, code_dir, prepare.job.seed)
    size = layout.size(flat.describe(model))
    sums = np.frombuffer(memory.map_first(shared.sums, 4 * size).data, np.float32)
    if prepare.role == "steps":
        return GradientRole(prepare, root, FlatParameters(model, sums=sums), shared.states)
    states = np.frombuffer(memory.map_first(shared.states, 4 * size * prepare.states).data, np.float32)
    return ParameterServerRole(prepare, root, model, states.reshape(prepare.states, size), sums)


class _HeldOut:
    """Samples to score a model on, read once."""

    def __init__(self, root: Path, job: Job) -> None:
        self._root, self._job = root, job
        self._samples: dict[str, Samples] = {}

    def __getitem__(self, folder: str) -> Samples:
        if folder not in self._samples:
            data = self._job.data
            self._samples[folder] = samples.load(self._root, (folder,), data.format, data.classes)
        return self._samples[folder]


class FederatedRole:
    """Trains whole rounds."""

    def __init__(self, prepare: PrepareWorker, root: Path, code_dir: Path) -> None:
        self._job, self._worker, self._code_dir = prepare.job, prepare.worker, code_dir
        self._model = user_code.build(prepare.job.model, code_dir, prepare.job.seed)
        self._tensors = flat.describe(self._model)
        data = prepare.job.data
        self._samples = samples.load(root, prepare.folders, data.format, data.classes)
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
            return Score(*training.evaluate(self._model, samples), len(samples)), b""
        return None

    def _initial(self) -> Initial:
        """Built anew, so the same whenever it is asked for."""
        flat.read(user_code.build(self._job.model, self._code_dir, self._job.seed), self._vector)
        return Initial()

    def _train(self, round_: int) -> Trained:
        if not len(self._samples):
            raise DataError(f"missing data: {self._worker} has no samples to train on")
        seed = seeds.derive(self._job.seed, self._worker, round_)
        flat.write(self._model, self._vector)
        loss, seconds = training.train_round(self._model, self._samples, self._job.train, seed)
        flat.read(self._model, self._vector)
        return Trained(round_, len(self._samples), loss, seconds)


class GradientRole:
    """Computes gradients of steps, at states in the memory ``states``, a descriptor."""

    def __init__(self, prepare: PrepareWorker, root: Path, binding: FlatParameters, states: int) -> None:
        self._descriptor, self._count = states, prepare.states
        self._memory: memory.CowView | None = None
        self._states: list[Vector] = []
        data = prepare.job.data
        parts = [samples.load(root, (folder,), data.format, data.classes) for folder in prepare.folders]
        self._samples = tuple(len(part) for part in parts)
        self._shape = next((part.images.shape[1:] for part in parts if len(part)), ())
        self._stepper = GradientWorker(binding, parts)

    def ready(self) -> Ready:
        """See Session."""
        binding = self._stepper.binding
        size = len(binding.state)
        return Ready(sum(self._samples), binding.tensors, size, parts=self._samples, shape=self._shape)

    def inlet(self, _message: Message) -> Vector | None:
        """See Session: none, vectors lie in shared memory."""
        return None

    def answer(self, message: Message) -> Answer | None:
        """See Session."""
        return (self._compute(message), b"") if isinstance(message, protocol.Compute) else None

    def _compute(self, request: protocol.Compute) -> protocol.Computed:
        binding, shared = self._stepper.binding, self._mapped()
        state = _numbered(self._states, request.state)
        if state is not binding.state:
            binding.bind(state)
        try:
            computed = self._stepper.compute(request)
        finally:
            written = shared.forget()
        if written is not None:
            raise LocalError(CHANGED.format(binding.tensor_at(written // 4 - request.state * len(state))))
        return computed

    def _mapped(self) -> memory.CowView:
        """Mapped at the first step: only then have those who keep the states surely made them."""
        if self._memory is None:
            size = len(self._stepper.binding.state)
            self._memory = memory.map_private(self._descriptor, 4 * size * self._count)
            self._states = list(np.frombuffer(self._memory.data, np.float32).reshape(self._count, size))
        return self._memory


class ParameterServerRole:
    """Keeps the model of a synchronous job, and scores it."""

    def __init__(
        self, prepare: PrepareWorker, root: Path, model: nn.Module, states: NDArray[np.float32], sums: Vector
    ) -> None:
        self._states = list(states)
        self._binding = FlatParameters(model, self._states[0], sums)
        self._held_out = _HeldOut(root, prepare.job)
        self._keeper = ServerOptimizer(self._binding, training.make_optimizer(model, prepare.job.train))
        self._momentum = np.empty(0, np.float32)

    def ready(self) -> Ready:
        """See Session."""
        return Ready(0, self._binding.tensors, len(self._binding.state))

    def inlet(self, message: Message) -> Vector | None:
        """See Session."""
        if isinstance(message, protocol.Restore):
            self._momentum = np.empty(layout.size(message.tensors), np.float32)
            return self._momentum
        return None

    def answer(self, message: Message) -> Answer | None:
        """See Session."""
        if isinstance(message, protocol.Apply):
            self._move(message.state)
            began = time.perf_counter()
            self._keeper.apply(message.factor)
            return protocol.StepApplied(time.perf_counter() - began), b""
        if isinstance(message, protocol.GetInitial):
            return Initial(), b""
        if isinstance(message, protocol.Evaluate):
            return self._score(self._held_out[message.folder]), b""
        if isinstance(message, protocol.GetMomentum):
            tensors, values = self._keeper.momentum()
            return protocol.Momentum(tensors, len(values)), values.data
        if isinstance(message, protocol.Restore):
            self._keeper.restore(message.tensors, self._momentum)
            return Ok(), b""
        return None

    def _score(self, samples: Samples) -> Score:
        binding = self._binding
        before = binding.state.copy()
        binding.loaded()
        score = Score(*training.evaluate(binding.model, samples), len(samples))
        binding.check_bound()
        changed = np.flatnonzero(binding.state.view(np.int32) != before.view(np.int32))
        if changed.size:
            binding.state[:] = before
            raise LocalError(CHANGED.format(binding.tensor_at(int(changed[0]))))
        return score

    def _move(self, number: int) -> None:
        """Go on in the state with this number, with the values of the present one, which stays as it is."""
        state = _numbered(self._states, number)
        if state is not self._binding.state:
            state[:] = self._binding.state
            self._binding.bind(state)


def _numbered(states: Sequence[Vector], number: int) -> Vector:
    if not 0 <= number < len(states):
        raise LocalError(f"there are {len(states)} states, and none with number {number}")
    return states[number]
