# SPDX-License-Identifier: Apache-2.0
"""Edge: the roles of a prepared process, each with the model and the samples of one job."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from millpond.base.errors import LocalError
from millpond.linux import memory
from millpond.train import protocol
from millpond.train.compute.evaluation import evaluate
from millpond.train.compute.local_trainer import LocalTrainer
from millpond.train.compute.optimizers import ServerOptimizer, make_optimizer
from millpond.train.compute.selection import SampleFolders
from millpond.train.data import samples
from millpond.train.data.samples import Samples
from millpond.train.determinism import generators
from millpond.train.job.spec import WorkSpec
from millpond.train.protocol import PrepareServer, PrepareWorker, Ready, Score, ServerReady
from millpond.train.state import flat, layout
from millpond.train.state.flat import Vector
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.worker import user_code
from millpond.wire.channel import Buffer
from millpond.wire.messages import Message, Ok

Answer = tuple[Message, Buffer]


class WorkerRole(Protocol):
    """One job in one process: the answers to the coordinator's requests."""

    def ready(self) -> Message:
        """Return the description of the prepared model or samples."""

    def inlet(self, message: Message, /) -> Vector | None:
        """Return the vector that receives the payload of ``message``, None for one without."""

    def answer(self, message: Message) -> Answer | None:
        """Answer a request; None if it is not for this role. Raises any exception of the user's code."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Descriptors of shared memory: ``states``, which the parameter server (on a device the agent) writes,
    and ``values``, which this process alone shares with its parent.
    """

    states: int
    values: int


def make(
    prepare: PrepareWorker | PrepareServer, root: Path, code_dir: Path, shared: Descriptors
) -> WorkerRole:
    """Build the model and load the samples. Raises LocalError, and any exception of the user's code."""
    generators.diverge()
    generators.be_deterministic(prepare.work.threads)
    if isinstance(prepare, PrepareServer):
        return ParameterServerRole(prepare, root, code_dir, shared)
    return TrainingRole(prepare, root, code_dir, shared)


class TrainingRole:
    """Trains from the states in shared memory."""

    def __init__(self, prepare: PrepareWorker, root: Path, code_dir: Path, shared: Descriptors) -> None:
        work = prepare.work
        model = user_code.build(work.model, code_dir, work.seed)
        if flat.describe(model) != prepare.tensors:
            raise LocalError(f"{prepare.worker} builds another model than the host")
        size, self._count, self._descriptor = layout.size(prepare.tensors), prepare.states, shared.states
        values = memory.map_second(shared.values, 4 * size)
        self._states: list[Vector] = []
        paths = [folder.path for folder in prepare.folders]
        self._parts = samples.load_each(root, paths, work.format, work.classes)
        parameters = FlatParameters(model, sums=np.frombuffer(values.data, np.float32))
        self._trainer = LocalTrainer(parameters, SampleFolders(work.seed, prepare.folders, self._parts), work)

    def ready(self) -> Ready:
        """Implement ``WorkerRole``."""
        return Ready(tuple(len(part) for part in self._parts))

    def inlet(self, _message: Message) -> Vector | None:
        """Implement ``WorkerRole``: there is none, vectors lie in shared memory."""
        return None

    def answer(self, message: Message) -> Answer | None:
        """Implement ``WorkerRole``."""
        if not isinstance(message, protocol.Work):
            return None
        return self._trainer.run(message, _numbered(self._mapped(), message.state)), b""

    def _mapped(self) -> list[Vector]:
        """Map the states at the first exchange: before it their owner may not have made them."""
        if not self._states:
            size = len(self._trainer.parameters.state)
            data = memory.map_read_only(self._descriptor, 4 * size * self._count)
            self._states = list(np.frombuffer(data, np.float32).reshape(self._count, size))
        return self._states


class ParameterServerRole:
    """Holds the model and the optimizer of a job, and scores the model."""

    def __init__(self, prepare: PrepareServer, root: Path, code_dir: Path, shared: Descriptors) -> None:
        work = prepare.work
        model = user_code.build(work.model, code_dir, work.seed)
        self._tensors = flat.describe(model)
        size = layout.size(self._tensors)
        mean = np.frombuffer(memory.map_first(shared.values, 4 * size).data, np.float32)
        states = memory.map_first(shared.states, 4 * size * prepare.states).data
        self._states = list(np.frombuffer(states, np.float32).reshape(prepare.states, size))
        # The server's parameters are float32 whatever the model's are, so that small means are not lost. The
        # model is scored as the workers have it: its forward may need its own types.
        self._scored = None
        if any(tensor.dtype != "float32" for tensor in self._tensors):
            own = user_code.build(work.model, code_dir, work.seed)
            self._scored = FlatParameters(own, self._states[0], mean)
        self._parameters = FlatParameters(model.float(), self._states[0], mean)
        self._held_out = _HeldOut(root, work)
        self._optimizer = ServerOptimizer(self._parameters, make_optimizer(model, prepare.optimizer))
        self._momentum = np.empty(0, np.float32)

    def ready(self) -> ServerReady:
        """Implement ``WorkerRole``."""
        return ServerReady(self._tensors)

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
        if isinstance(message, protocol.Evaluate):
            return self._score(self._held_out[message.folder]), b""
        if isinstance(message, protocol.GetMomentum):
            tensors, values = self._optimizer.momentum()
            return protocol.Momentum(tensors, len(values)), values.data
        if isinstance(message, protocol.Restore):
            self._optimizer.restore(message.tensors, self._momentum)
            return Ok(), b""
        return None

    def _score(self, held_out: Samples) -> Score:
        parameters, state = self._scored or self._parameters, self._parameters.state
        before = zlib.crc32(state.data)
        if parameters.state is not state:
            parameters.bind(state)
        parameters.loaded()
        score = Score(*evaluate(parameters.model, held_out), len(held_out))
        parameters.check_bound()
        if zlib.crc32(parameters.state.data) != before:
            raise LocalError("the model changes a parameter while it is scored")
        return score

    def _move(self, number: int) -> None:
        """Copy the present state into the one with this number and bind the model to it."""
        state = _numbered(self._states, number)
        if state is not self._parameters.state:
            state[:] = self._parameters.state
            self._parameters.bind(state)


class _HeldOut:
    """Samples to score a model on, by folder, each read once."""

    def __init__(self, root: Path, work: WorkSpec) -> None:
        self._root, self._work = root, work
        self._samples: dict[str, Samples] = {}

    def __getitem__(self, folder: str) -> Samples:
        if folder not in self._samples:
            self._samples[folder] = samples.load(self._root, (folder,), self._work.format, self._work.classes)
        return self._samples[folder]


def _numbered(states: Sequence[Vector], number: int) -> Vector:
    if not 0 <= number < len(states):
        raise LocalError(f"there are {len(states)} states, and none with number {number}")
    return states[number]
