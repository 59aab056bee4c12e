# SPDX-License-Identifier: Apache-2.0
"""Edge: the roles of a prepared worker, each with the model and the samples of one job."""

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
    """One job on one worker: the answers to the coordinator's requests."""

    def ready(self) -> Ready:
        """Return the description of the prepared model and samples."""

    def inlet(self, message: Message, /) -> Vector | None:
        """Return the vector that receives the payload of ``message``, None for one without."""

    def answer(self, message: Message) -> Answer | None:
        """Answer a request; None if it is not for this role. Raises any exception of the user's code."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Descriptors of a synchronous job's shared memory: ``states``, which the parameter server writes and
    others read, and ``sums``, which this worker alone shares with its parent.
    """

    states: int
    sums: int


def make(prepare: PrepareWorker, root: Path, code_dir: Path, shared: Descriptors | None) -> WorkerRole:
    """Build the model and load the samples. Raises LocalError, and any exception of the user's code."""
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
    """Samples to score a model on, by folder, each read once."""

    def __init__(self, root: Path, job: Job) -> None:
        self._root, self._job = root, job
        self._samples: dict[str, Samples] = {}

    def __getitem__(self, folder: str) -> Samples:
        if folder not in self._samples:
            data = self._job.data
            self._samples[folder] = samples.load(self._root, (folder,), data.format, data.classes)
        return self._samples[folder]


class FederatedRole:
    """Trains whole rounds of a federated job."""

    def __init__(self, prepare: PrepareWorker, root: Path, code_dir: Path) -> None:
        self._job, self._worker, self._code_dir = prepare.job, prepare.worker, code_dir
        self._model = user_code.build(prepare.job.model, code_dir, prepare.job.seed)
        self._tensors = flat.describe(self._model)
        data = prepare.job.data
        self._samples = samples.load(root, prepare.folders, data.format, data.classes)
        self._held_out = _HeldOut(root, prepare.job)
        self._vector = np.empty(layout.size(self._tensors), np.float32)

    def ready(self) -> Ready:
        """Implement ``WorkerRole``."""
        return Ready(len(self._samples), self._tensors, len(self._vector))

    def inlet(self, message: Message) -> Vector | None:
        """Implement ``WorkerRole``."""
        return self._vector if isinstance(message, (protocol.Train, protocol.Evaluate)) else None

    def answer(self, message: Message) -> Answer | None:
        """Implement ``WorkerRole``."""
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
        """Build the model anew, so that every request gets the same state."""
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
    """Computes gradients of synchronous steps; ``states`` is the descriptor of the shared states."""

    def __init__(self, prepare: PrepareWorker, root: Path, parameters: FlatParameters, states: int) -> None:
        self._descriptor, self._count = states, prepare.states
        self._memory: memory.CowView | None = None
        self._states: list[Vector] = []
        data = prepare.job.data
        parts = [samples.load(root, (folder,), data.format, data.classes) for folder in prepare.folders]
        self._samples = tuple(len(part) for part in parts)
        self._shape = next((part.images.shape[1:] for part in parts if len(part)), ())
        self._gradient_worker = GradientWorker(parameters, parts)

    def ready(self) -> Ready:
        """Implement ``WorkerRole``."""
        parameters = self._gradient_worker.parameters
        size = len(parameters.state)
        return Ready(sum(self._samples), parameters.tensors, size, parts=self._samples, shape=self._shape)

    def inlet(self, _message: Message) -> Vector | None:
        """Implement ``WorkerRole``: there is none, vectors lie in shared memory."""
        return None

    def answer(self, message: Message) -> Answer | None:
        """Implement ``WorkerRole``."""
        return (self._compute(message), b"") if isinstance(message, protocol.Compute) else None

    def _compute(self, request: protocol.Compute) -> protocol.Computed:
        parameters, shared = self._gradient_worker.parameters, self._mapped()
        state = _numbered(self._states, request.state)
        if state is not parameters.state:
            parameters.bind(state)
        try:
            computed = self._gradient_worker.compute(request)
        finally:
            written = shared.forget()
        if written is not None:
            raise LocalError(CHANGED.format(parameters.tensor_at(written // 4 - request.state * len(state))))
        return computed

    def _mapped(self) -> memory.CowView:
        """Map the states at the first step: before it their owner may not have made them."""
        if self._memory is None:
            size = len(self._gradient_worker.parameters.state)
            self._memory = memory.map_private(self._descriptor, 4 * size * self._count)
            self._states = list(np.frombuffer(self._memory.data, np.float32).reshape(self._count, size))
        return self._memory


class ParameterServerRole:
    """Holds the model and the optimizer of a synchronous job, and scores the model."""

    def __init__(
        self, prepare: PrepareWorker, root: Path, model: nn.Module, states: NDArray[np.float32], sums: Vector
    ) -> None:
        self._states = list(states)
        self._parameters = FlatParameters(model, self._states[0], sums)
        self._held_out = _HeldOut(root, prepare.job)
        self._optimizer = ServerOptimizer(self._parameters, training.make_optimizer(model, prepare.job.train))
        self._momentum = np.empty(0, np.float32)

    def ready(self) -> Ready:
        """Implement ``WorkerRole``."""
        return Ready(0, self._parameters.tensors, len(self._parameters.state))

    def inlet(self, message: Message) -> Vector | None:
        """Implement ``WorkerRole``."""
        if isinstance(message, protocol.Restore):
            self._momentum = np.empty(layout.size(message.tensors), np.float32)
            return self._momentum
        return None

    def answer(self, message: Message) -> Answer | None:
        """Implement ``WorkerRole``."""
        if isinstance(message, protocol.Apply):
            self._move(message.state)
            began = time.perf_counter()
            self._optimizer.apply(message.factor)
            return protocol.StepApplied(time.perf_counter() - began), b""
        if isinstance(message, protocol.GetInitial):
            return Initial(), b""
        if isinstance(message, protocol.Evaluate):
            return self._score(self._held_out[message.folder]), b""
        if isinstance(message, protocol.GetMomentum):
            tensors, values = self._optimizer.momentum()
            return protocol.Momentum(tensors, len(values)), values.data
        if isinstance(message, protocol.Restore):
            self._optimizer.restore(message.tensors, self._momentum)
            return Ok(), b""
        return None

    def _score(self, samples: Samples) -> Score:
        parameters = self._parameters
        before = parameters.state.copy()
        parameters.loaded()
        score = Score(*training.evaluate(parameters.model, samples), len(samples))
        parameters.check_bound()
        changed = np.flatnonzero(parameters.state.view(np.int32) != before.view(np.int32))
        if changed.size:
            parameters.state[:] = before
            raise LocalError(CHANGED.format(parameters.tensor_at(int(changed[0]))))
        return score

    def _move(self, number: int) -> None:
        """Copy the present state into the one with this number and bind the model to it."""
        state = _numbered(self._states, number)
        if state is not self._parameters.state:
            state[:] = self._parameters.state
            self._parameters.bind(state)


def _numbered(states: Sequence[Vector], number: int) -> Vector:
    if not 0 <= number < len(states):
        raise LocalError(f"there are {len(states)} states, and none with number {number}")
    return states[number]
