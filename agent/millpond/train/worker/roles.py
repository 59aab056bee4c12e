# SPDX-License-Identifier: Apache-2.0
"""Edge: the roles of a prepared process, each with the model and the samples of one job."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import nn

from millpond.aggregate.messages import Advance
from millpond.base.errors import LocalError
from millpond.linux import memory
from millpond.train import error_texts, protocol
from millpond.train.data.errors import DataError
from millpond.train.data.read_ahead import ReadAhead
from millpond.train.data.streamed import StreamedSamples
from millpond.train.determinism import generators
from millpond.train.job.spec import WorkSpec
from millpond.train.local import accelerator
from millpond.train.local.accelerator import device_of
from millpond.train.local.evaluation import autocast, evaluate
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.optimizers import Schedule, make_optimizer
from millpond.train.local.selection import SampleFolders, Selection
from millpond.train.protocol import Folder, PrepareServer, PrepareWorker, Ready, Score, ServerReady
from millpond.train.server.server_optimizer import server_optimizer_of
from millpond.train.state import flat, initial, layout
from millpond.train.state.flat import Vector
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.state.private_state import PrivateState
from millpond.train.strategies.catalogue import beyond_averaging, unfit_for_steps
from millpond.train.strategies.fedavg import FedAvg
from millpond.train.task import structure
from millpond.train.task.sums import Sums
from millpond.train.task.task import SampleSet, Task
from millpond.train.worker import user_code
from millpond.train.worker.trial import try_out
from millpond.wire.channel import Buffer
from millpond.wire.messages import Message, Ok

Answer = tuple[Message, Buffer]
OpenStream = Callable[[WorkSpec, Folder], ReadAhead]
"""Returns the samples of a folder on another device, by their indices. Raises RemoteError."""

_OWN_TYPES = (*layout.FLOATS[1:], *map(layout.raw, layout.RAW))
"""Types that the parameter server's own model does not have."""
_TRIED = 2
"""Samples that a worker reads whose job has no rounds; or a group."""


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
    prepare: PrepareWorker | PrepareServer,
    root: Path,
    code_dir: Path,
    shared: Descriptors,
    private: Path | None = None,
    open_stream: OpenStream | None = None,
    tell: Callable[[int], None] | None = None,
) -> WorkerRole:
    """Build the model and load the samples, those of streamed folders by ``open_stream``. ``tell`` is called
    with the percentage of an exchange that is done. Raises LocalError, and any exception of the user's code.
    """
    generators.diverge()
    generators.be_deterministic(prepare.work.threads)
    if isinstance(prepare, PrepareServer):
        return ParameterServerRole(prepare, root, code_dir, shared)
    return TrainingRole(prepare, root, code_dir, shared, private, open_stream, tell)


class TrainingRole:
    """Trains from the states in shared memory. The task's own state, and what is trained for this worker
    alone, lie in the folder ``private``.
    """

    def __init__(
        self,
        prepare: PrepareWorker,
        root: Path,
        code_dir: Path,
        shared: Descriptors,
        private: Path | None = None,
        open_stream: OpenStream | None = None,
        tell: Callable[[int], None] | None = None,
    ) -> None:
        work = prepare.work
        task, model = user_code.build(work, code_dir)
        _initialize(model, work, code_dir)
        local = flat.local_names(model, work.local_layers)
        if flat.describe(model, local) != prepare.tensors:
            raise LocalError(error_texts.OTHER_MODEL(prepare.worker))
        if flat.checksum(model, local) != prepare.frozen and prepare.first:
            unsent = flat.unsent_names(model) | local
            if other := initial.take_rounded(model, code_dir / protocol.FIRST_VALUES, unsent):
                raise LocalError(error_texts.BEYOND_ROUNDING(prepare.worker, other))
        if flat.checksum(model, local) != prepare.frozen:
            raise LocalError(error_texts.OTHER_VALUES(prepare.worker))
        if (local or work.local.alpha) and private is None:
            raise LocalError(error_texts.UNKEPT_STATE())
        size, self._count, self._descriptor = layout.size(prepare.tensors), prepare.states, shared.states
        values = memory.map_second(shared.values, 4 * size)
        self._states: list[Vector] = []
        parts = [_opened(task, root, work, folder, open_stream) for folder in prepare.folders]
        for folder, part in zip(prepare.folders, parts, strict=True):
            if not len(part):
                raise DataError(error_texts.HOLDS_NO_SAMPLES(folder.path))
        with autocast(work, device_of(model)):
            task.check(parts, model)
        model = accelerator.place(model, prepare.accelerator)
        parameters = FlatParameters(model, sums=np.frombuffer(values.data, np.float32), local=local)
        self._samples = SampleFolders(task, work.seed, prepare.folders, parts, work.held_out)
        self._trainer = LocalTrainer(
            parameters, task, self._samples, work, prepare.run, private, prepare.fast, tell
        )
        self._batch = () if work.total else self._first_batch(task, prepare, parts)
        kept = task.state() if private else None
        self._private = PrivateState(kept, private, prepare.run) if kept is not None and private else None

    @staticmethod
    def _first_batch(
        task: Task, prepare: PrepareWorker, parts: Sequence[SampleSet]
    ) -> tuple[protocol.BatchPart, ...]:
        """Read a batch of the first folder, of a group at least: an error in it is of no single sample."""
        if not parts:
            return ()
        count = min(max(prepare.folders[0].group, _TRIED), len(parts[0]))
        return structure.parts_of(task.fetch([(parts[0], np.arange(count))]))

    def ready(self) -> Ready:
        return Ready(self._samples.counts, self._samples.held, batch=self._batch)

    def inlet(self, _message: Message) -> Vector | None:
        """Implement ``WorkerRole``: there is none, vectors lie in shared memory."""
        return None

    def answer(self, message: Message) -> Answer | None:
        if not isinstance(message, protocol.Work):
            return None
        trains = not (message.held_out or message.synthetic)
        if self._private and trains:
            self._private.begin(message.exchange, message.seed, message.recorded)
        update = self._trainer.run(message, _numbered(self._mapped(), message.state))
        if self._private and trains:
            self._private.save(message.exchange, message.seed, records=message.records)
        elif self._private:
            self._private.restore()
        return update, b""

    def _mapped(self) -> list[Vector]:
        """Map the states at the first exchange: before it their owner may not have made them."""
        if not self._states:
            size = len(self._trainer.parameters.state)
            data = memory.map_read_only(self._descriptor, 4 * size * self._count)
            self._states = list(np.frombuffer(data, np.float32).reshape(self._count, size))
        return self._states


def _opened(
    task: Task, root: Path, work: WorkSpec, folder: Folder, open_stream: OpenStream | None
) -> SampleSet:
    """Return the samples of a folder, here or on another device. Raises DataError."""
    if not folder.streamed:
        return task.dataset(root, folder.path, "train")
    if open_stream is None:
        raise LocalError(error_texts.NO_STREAMS())
    return StreamedSamples(lambda: open_stream(work, folder), folder.path, folder.source)


class ParameterServerRole:
    """Holds the model and the optimizer of a job, and scores the model."""

    def __init__(self, prepare: PrepareServer, root: Path, code_dir: Path, shared: Descriptors) -> None:
        work = prepare.work
        self._task, model = user_code.build(work, code_dir)
        if prepare.streamed:
            _check_streamed(self._task)
        self._note = _initialize(model, work, code_dir)
        layers = flat.local_names(model, work.local_layers)
        self._tensors = flat.describe(model, layers)
        self._frozen = flat.describe_unsent(model, layers)
        self._frozen_checksum = flat.checksum(model, layers)
        flat.freeze(model, layers)
        unsent = layers | flat.constant_names(model)  # which float() below would make others
        size = layout.size(self._tensors)
        mean = np.frombuffer(memory.map_first(shared.values, 4 * size).data, np.float32)
        states = memory.map_first(shared.states, 4 * size * prepare.states).data
        self._states = list(np.frombuffer(states, np.float32).reshape(prepare.states, size))
        self._held_out = _HeldOut(self._task, root)
        # The server's parameters are float32 whatever the model's are, so that small means are not lost. The
        # model is scored as the workers have it: its forward may need its own types.
        self._scored = None
        own_types = any(tensor.dtype in _OWN_TYPES for tensor in self._tensors + self._frozen)
        if own_types or prepare.accelerator != "cpu":
            _, own = user_code.build(work, code_dir)
            _initialize(own, work, code_dir)
            own = accelerator.place(own, prepare.accelerator)
            if own_types or device_of(own).type != "cpu":
                self._scored = FlatParameters(own, self._states[0], mean, unsent)
        self._parameters = FlatParameters(model.float(), self._states[0], mean, unsent)
        self._work = work
        local = work.passes > 0
        self._strategy = user_code.strategy(prepare.strategy, code_dir) if local else FedAvg()
        if local and not work.batch and (fault := unfit_for_steps(self._strategy)):
            raise LocalError(f"synchronous: strategy: {fault}; it is for [federated]")
        self._optimizer = server_optimizer_of(self._parameters, work, self._strategy, self._task)
        if local:  # a fault of the workers' own is told before they begin
            Schedule(
                make_optimizer(model, work.optimizer, self._task), work.scheduler, work.total, self._task
            )
        self._momentum = np.empty(0, np.float32)
        if prepare.test:
            self._try(prepare, root, code_dir, layers)

    def _try(self, prepare: PrepareServer, root: Path, code_dir: Path, local: Collection[str]) -> None:
        """Try the job, with a task and a model of its own. Raises LocalError, and any exception of the user's
        code.
        """
        work = prepare.work
        task, model = user_code.build(work, code_dir)
        _initialize(model, work, code_dir)
        samples = _test_samples(task, root, prepare.test)
        try_out(task, accelerator.place(model, prepare.accelerator), work, self._strategy, samples, local)

    def ready(self) -> ServerReady:
        local, combine = self._strategy.local, self._strategy.combine
        stateless = not self._work.local_layers and not local.personal and self._task.state() is None
        return ServerReady(
            self._tensors,
            self._frozen,
            self._frozen_checksum,
            self._note,
            local,
            combine,
            self._step,
            stateless,
        )

    @property
    def _step(self) -> Advance | None:
        """The step from one state to the next, if it is that of FedAvg and no value is rounded."""
        types = {tensor.dtype for tensor in self._tensors}
        subtracts = (
            self._work.passes > 0
            and types <= {"float32", *layout.INTEGERS}
            and not beyond_averaging(self._strategy)
        )
        return Advance(self._parameters.added) if subtracts else None

    def inlet(self, message: Message) -> Vector | None:
        if isinstance(message, protocol.Restore):
            self._momentum = np.empty(layout.size(message.tensors), np.float32)
            return self._momentum
        return None

    def answer(self, message: Message) -> Answer | None:
        if isinstance(message, protocol.Apply):
            self._move(message.state)
            began = time.perf_counter()
            self._optimizer.apply(message.factor, message.epoch, frozenset(message.unused), message.share)
            return protocol.StepApplied(time.perf_counter() - began), b""
        if isinstance(message, protocol.Evaluate):
            return self._score(message), b""
        if isinstance(message, protocol.GetMomentum):
            tensors, values = self._optimizer.momentum()
            return protocol.Momentum(tensors, len(values)), values.data
        if isinstance(message, protocol.GetModel):
            frozen = np.empty(layout.size(self._frozen), np.float32)
            flat.read((self._scored or self._parameters).model, frozen, self._frozen)
            with self._optimizer.in_use() as state:
                values = np.concatenate([state, frozen])
            return protocol.Model(self._tensors + self._frozen, len(values)), values.data
        if isinstance(message, protocol.Restore):
            self._optimizer.restore(message.tensors, self._momentum)
            return Ok(), b""
        return None

    def _score(self, request: protocol.Evaluate) -> Score:
        with self._optimizer.in_use() as state:
            own = self._evaluate(self._held_out[request.folder], state) if request.folder else {}
        return Score(
            self._task.summary(own) if own else {},
            self._task.summary(request.devices) if request.devices else {},
        )

    def _evaluate(self, held_out: Selection, state: Vector) -> Sums:
        parameters = self._scored or self._parameters
        before = zlib.crc32(state.data)
        if parameters.state is not state:
            parameters.bind(state)
        parameters.loaded()
        found = evaluate(parameters.model, self._task, held_out, self._work)
        parameters.check_bound()
        if zlib.crc32(parameters.state.data) != before:
            raise LocalError("the model changes a parameter while it is scored")
        return found

    def _move(self, number: int) -> None:
        """Copy the present state into the one with this number and bind the model to it."""
        state = _numbered(self._states, number)
        if state is not self._parameters.state:
            state[:] = self._parameters.state
            self._parameters.bind(state)


def _check_streamed(task: Task) -> None:
    """Raise LocalError for a task whose samples, or whose workers, cannot be those of a stream."""
    if task.has("dataset"):
        raise LocalError(
            "data.public: samples that are streamed are labelled images; the task's dataset reads folders"
        )
    if task.has("state"):
        raise LocalError(
            "data.public: a worker that has a stream keeps nothing on its device; the task has state"
        )


class _HeldOut:
    """Samples to score a model on, by folder, each opened once."""

    def __init__(self, task: Task, root: Path) -> None:
        self._task, self._root = task, root
        self._samples: dict[str, Selection] = {}

    def __getitem__(self, folder: str) -> Selection:
        if folder not in self._samples:
            part = _test_samples(self._task, self._root, folder)
            every = np.arange(len(part))
            self._samples[folder] = Selection(self._task, [part], [every], every)
        return self._samples[folder]


def _test_samples(task: Task, root: Path, folder: str) -> SampleSet:
    """Return the samples of a folder to score a model on. Raises DataError."""
    part = task.dataset(root, folder, "test")
    if not len(part):
        raise DataError(error_texts.HOLDS_NO_SAMPLES(folder))
    return part


def _initialize(model: nn.Module, work: WorkSpec, code_dir: Path) -> str:
    """Take the first values from the file that the job names. Returns a line of text, "" without one."""
    return initial.load(model, code_dir / str(work.model.initial)) if work.model.initial else ""


def _numbered(states: Sequence[Vector], number: int) -> Vector:
    if not 0 <= number < len(states):
        raise LocalError(error_texts.NO_SUCH_STATE(len(states), number))
    return states[number]
