# SPDX-License-Identifier: Apache-2.0
"""Edge (a process): the parameter server: a job's model and its optimizer, on the host."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import numpy as np

from millpond.aggregate.kernels import Vector
from millpond.base.deadline import Deadline
from millpond.base.errors import ProtocolError
from millpond.host.workers.worker import REPLY_SECONDS, HostProcess, ModelState, R
from millpond.linux import memory
from millpond.linux.zygote.client import Zygote
from millpond.train.protocol import (
    Apply,
    Evaluate,
    GetModel,
    GetMomentum,
    Model,
    Momentum,
    PrepareServer,
    Restore,
    Score,
    ServerReady,
    StepApplied,
)
from millpond.train.state import layout
from millpond.train.state.layout import Tensor
from millpond.train.task.sums import Sums
from millpond.train.worker.start import WorkerFiles
from millpond.wire.channel import Buffer
from millpond.wire.messages import Message, Ok

PARAMETER_SERVER = "parameter-server"


class ParameterServer(HostProcess):
    """Applies means of gradients or differences to the model, and scores it. ``state`` is the present state
    of the model and ``mean`` the input of ``apply``, both in memory that the process shares.
    """

    state: ModelState
    mean: Vector
    ready: ServerReady
    tensors: tuple[Tensor, ...]

    def __init__(
        self,
        request: PrepareServer,
        files: WorkerFiles,
        readable: Sequence[Path],
        log: Path,
        zygote: Zygote,
        states: int,
    ) -> None:
        super().__init__(PARAMETER_SERVER, request, files, readable, log, zygote, states)
        self._count, self._calls = request.states, threading.RLock()

    def prepare(self, deadline: Deadline) -> None:
        """Build the model; ``state`` is then the seeded first one."""
        self.ready = self._prepare(ServerReady, deadline)
        self.tensors = self.ready.tensors
        size = 4 * layout.size(self.tensors)
        try:
            states = memory.map_second(self.states, self._count * size)
            memory.freeze(self.states)  # from now on, other workers can only read them
            self.mean = np.frombuffer(memory.map_second(self.values, size).data, np.float32)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"the parameter server: {error}") from None
        self._states = [ModelState(states.part(size * number, size)) for number in range(self._count)]
        self.state = self._states[0]

    def description(self, local_layers: Sequence[str]) -> list[str]:
        """Return lines about the model: its first values, and the part of it that is exchanged; tensors that
        match ``local_layers`` stay on their devices.
        """
        ready, lines = self.ready, [self.ready.note] if self.ready.note else []
        if ready.frozen:
            own, kept = layout.size(ready.tensors), layout.size(ready.frozen)
            local = set(layout.matching((tensor.name for tensor in ready.frozen), local_layers))
            layers = layout.size(tuple(tensor for tensor in ready.frozen if tensor.name in local))
            lines.append(
                f"{own} of {own + kept} values are trained and exchanged"
                f"{f', {layers} stay on their devices' if layers else ''}: "
                f"{100 * kept / (own + kept):.1f} % of the bytes of each exchange are saved"
            )
        return lines

    def apply(
        self,
        factor: float,
        epoch: int,
        in_use: AbstractSet[ModelState],
        unused: Collection[int] = (),
        share: float = 0.0,
    ) -> float:
        """Take one step of the optimizer with ``mean``, at ``factor`` times its rate of ``epoch``, of which
        a ``share`` is done, in which ``unused`` parameters have no part. Changes ``state`` in place, unless
        it is ``in_use``: then ``state`` is a new one. Returns the optimizer's seconds.
        """
        free = [number for number, state in enumerate(self._states) if state not in in_use]
        number = free[0] if self.state in in_use else self._states.index(self.state)
        applied = self._call(Apply(factor, epoch, number, tuple(sorted(unused)), share), StepApplied)
        self.state = self._states[number]
        return applied.seconds

    def score(self, folder: str, devices: Sums) -> Score:
        """Score ``state`` on the samples in ``folder``, if any, and summarize the sums of the devices."""
        return self._call(Evaluate(folder, devices), Score)

    def model(self) -> tuple[tuple[Tensor, ...], Vector]:
        """Return all tensors of the model as it is to be used, and their values, float32 [size]."""
        with self._calls:
            found = self._call(GetModel(), Model, size=None)
            values = np.empty(found.size, np.float32)
            self.channel.receive_into(values.data, Deadline.after(REPLY_SECONDS))
        return found.tensors, values

    def _call(self, request: Message, reply: type[R], payload: Buffer = b"", size: int | None = 0) -> R:
        """See HostProcess: first values may be asked for by another thread than the rest."""
        with self._calls:
            return super()._call(request, reply, payload, size)

    def momentum(self) -> tuple[tuple[Tensor, ...], Vector]:
        """Return the optimizer's tensors and their values, float32 [size]."""
        with self._calls:
            momentum = self._call(GetMomentum(), Momentum, size=None)
            values = np.empty(momentum.size, np.float32)
            self.channel.receive_into(values.data, Deadline.after(REPLY_SECONDS))
        return momentum.tensors, values

    def restore(self, state: Vector, tensors: tuple[Tensor, ...], momentum: Vector) -> None:
        """Resume from a state and the optimizer's tensors of the same step."""
        self.state.values[:] = state
        self._call(Restore(tensors), Ok, momentum.data)

    def replace(self, state: Vector) -> None:
        """Go on from another state, float32 [size]; the optimizer keeps its tensors."""
        self.restore(state, *self.momentum())

    def reload(self) -> None:
        """Take the values that were written to ``state``; the optimizer has no tensors."""
        self._call(Restore(()), Ok)
