# SPDX-License-Identifier: Apache-2.0
"""Support of the tests of rounds: devices of one model in this process, whose real updates are encoded,
reduced and applied as a job does it, in an order that a test gives.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from millpond.aggregate.encoding.codec import codec
from millpond.aggregate.encoding.layout import Encoding
from millpond.aggregate.encoding.update_encoder import UpdateEncoder
from millpond.aggregate.kernels import Vector
from millpond.aggregate.rules.catalogue import rule_of
from millpond.base.deadline import Deadline
from millpond.host.jobs.training.collection import ALL_COUNT, LatePolicy
from millpond.host.jobs.training.reduction import UpdateBuffer, UpdateReduction
from millpond.host.workers.dispatcher import Assignment, Dispatcher, WorkerAnswer
from millpond.host.workers.worker import ModelState
from millpond.train.determinism import generators
from millpond.train.job.spec import WorkSpec
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.selection import SampleFolders
from millpond.train.protocol import Folder, Ready, Update, Work
from millpond.train.server.server_optimizer import ServerOptimizer, optimizer_of
from millpond.train.state import layout
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.strategies.strategy import Strategy
from millpond.train.task.task import SampleSet, Task
from millpond.train.update_bounds import UpdateBounds

from .steps import zero_state


class RealDevice:
    """A worker whose updates are those of local training on its ``samples``, as they are decoded."""

    holds = False
    percent = 0

    def __init__(
        self, rank: int, task: object, samples: SampleSet, work: WorkSpec, encoding: Encoding | None
    ) -> None:
        self.name, self.rank, self.samples = f"csd{rank}", rank, len(samples)
        generators.plant(1)
        hooks = Task(task)
        self.parameters = FlatParameters(hooks.model())
        own = SampleFolders(hooks, work.seed, [Folder(self.name, self.name, group=8)], [samples])
        self._trainer = LocalTrainer(self.parameters, hooks, own, work)
        size, end = len(self.parameters.sums), layout.parameters_end(self.parameters.tensors)
        self._end, self._next = end, 0
        self._encoder = UpdateEncoder(encoding, size, end) if encoding else None
        self._values = np.empty(size, np.float32)

    def prepare(self, deadline: Deadline) -> Ready:
        raise AssertionError

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        raise AssertionError

    def answer(self, number: int, state: ModelState) -> tuple[Assignment, Update]:
        """Train from a state. The values are there until the next call."""
        request = Work(number, number, number, (((0, self.samples),),))
        update = self._trainer.run(request, state.values)
        self._values[:] = self.parameters.sums
        if self._encoder:
            update = self._decoded(self._encoder, update)
        return Assignment(request, state), update

    def _decoded(self, encoder: UpdateEncoder, update: Update) -> Update:
        whole = memoryview(bytearray(self._values.tobytes()))
        largest, norm = encoder.encode(whole, lambda part: part)
        data, cut = encoder.data(0, len(self._values)), encoder.encoding.size(self._end)
        encoder.sent(len(self._values))
        out = memoryview(bytearray(4 * self._end))
        assert codec(encoder.encoding).decode(encoder.encoding, bytearray(data[:cut]), out)  # type: ignore[arg-type]
        self._values[: self._end] = np.frombuffer(out, np.float32)
        self._values[self._end :] = np.frombuffer(data[cut:], np.float32)
        return replace(update, largest=largest, norm=norm)

    def fetch(self, stop: int, deadline: Deadline) -> None:
        self._next = 0

    def read(self, out: Vector, deadline: Deadline) -> None:
        out[:] = self._values[self._next : self._next + len(out)]
        self._next += len(out)

    def close(self) -> None:
        pass


class Rounds:
    """A job of ``task`` in rounds over devices with these ``parts``."""

    def __init__(
        self,
        task: object,
        parts: Sequence[SampleSet],
        work: WorkSpec,
        strategy: Strategy,
        *,
        late: LatePolicy = ALL_COUNT,
        encoding: Encoding | None = None,
    ) -> None:
        self.devices = [RealDevice(n, task, part, work, encoding) for n, part in enumerate(parts)]
        generators.plant(1)
        self.average = FlatParameters(Task(task).model())
        self.end = layout.parameters_end(self.average.tensors)
        block = encoding.block if encoding else 1
        combine = strategy.combine
        self._mean, rule = self.average.sums, rule_of(combine.rule, combine.share, block)
        self._reduction = UpdateReduction(self._mean, None, rule, None, late, self.end)
        self._buffer = UpdateBuffer(self._mean, self._reduction, late.buffer) if late.buffer else None
        optimizer = optimizer_of(strategy, self.average.model)
        self._optimizer = ServerOptimizer(self.average, optimizer, differences=True)
        self._bounds, self.number = UpdateBounds(normalized=work if strategy.local.normalized else None), 0
        self._dispatchers = [Dispatcher(d.rank, d, queue.SimpleQueue()) for d in self.devices]
        self.state = zero_state(len(self._mean))
        self.begin()

    def begin(self) -> None:
        """Begin the next round from the present state."""
        self.number += 1
        self.state = zero_state(len(self._mean))
        self.state.values[:] = self.average.state
        self._reduction.begin(self.number, self.state.values)
        if self._buffer:
            self._buffer.begin(max(device.samples for device in self.devices))

    def ask(self, rank: int) -> WorkerAnswer:
        """Return a device's answer to a task of the present round."""
        task, update = self.devices[rank].answer(self.number, self.state)
        assert not self._bounds.refusal(task.request, update)
        return WorkerAnswer(self._dispatchers[rank], task, update, 0.1)

    def take(self, answer: WorkerAnswer) -> None:
        """Take an answer into the buffer."""
        assert self._buffer and not self._buffer.add(answer, self.number)

    def apply(self, answers: Sequence[WorkerAnswer]) -> None:
        """End the round with these answers."""
        if self._buffer:
            self._buffer.finish()
        else:
            assert not self._reduction.run(answers, self.number)
        weight = sum(answer.update.weight for answer in answers)
        steps = sum(answer.update.weight * answer.update.local_steps for answer in answers) / weight
        self._optimizer.apply(steps, self.number)
        self.begin()

    def close(self) -> None:
        for dispatcher in self._dispatchers:
            dispatcher.end()


def run_together(job: Rounds, rounds: int) -> None:
    """Each round is of the answers of all devices."""
    for _ in range(rounds):
        job.apply([job.ask(rank) for rank in range(len(job.devices))])


def run_with_a_late_device(job: Rounds, rounds: int) -> None:
    """The answers of the last device all come one round late."""
    *others, last = range(len(job.devices))
    late: list[WorkerAnswer] = []
    for _ in range(rounds):
        answers = [job.ask(rank) for rank in others]
        coming = [] if late else [job.ask(last)]
        job.apply(answers + late)
        late = coming


def run_buffered(job: Rounds, rounds: int) -> None:
    """Devices answer in turn, each from the state of its last answer's time; two answers make a round."""
    count = len(job.devices)
    under_way = [job.ask(rank) for rank in range(count)]
    for number in range(rounds):
        answers = []
        for rank in ((2 * number) % count, (2 * number + 1) % count):
            job.take(under_way[rank])
            answers.append(under_way[rank])
            under_way[rank] = job.ask(rank)
        job.apply(answers)


Run = Callable[[Rounds, int], None]
