# SPDX-License-Identifier: Apache-2.0
"""Edge (a process): the parameter server: the model of a synchronous job and its optimizer, on the host."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np

from millpond.base.deadline import Deadline
from millpond.base.errors import ProtocolError
from millpond.host.workers.worker import HostProcess, ModelState
from millpond.linux import memory
from millpond.train.protocol import (
    Apply,
    Compute,
    Computed,
    Evaluate,
    GetInitial,
    GetMomentum,
    Initial,
    Momentum,
    Restore,
    Score,
    StepApplied,
)
from millpond.train.reduce.exact import Vector
from millpond.train.state.layout import Tensor
from millpond.wire.messages import Ok


class ParameterServer(HostProcess):
    """Applies means of gradients to the model, and scores it. ``state`` is the present state of the model and
    ``mean`` the input of ``apply``, both in memory that the process shares.
    """

    state: ModelState
    mean: Vector

    def _map(self) -> None:
        count, size = self._request.states, 4 * self._size
        states = memory.map_second(self._shared[0], count * size)
        memory.freeze(self._shared[0])  # from now on, other workers can only read them
        self._states = [ModelState(states.part(size * number, size)) for number in range(count)]
        self.mean = np.frombuffer(memory.map_second(self._shared[1], size).data, np.float32)
        self.state = self._states[0]

    def begin(self, deadline: Deadline) -> None:
        """Set ``state`` to the seeded first state."""
        self._connected.call(GetInitial(), Initial, deadline)

    def apply(self, factor: float, in_use: AbstractSet[ModelState], deadline: Deadline) -> float:
        """Take one step of the optimizer with ``mean``, at ``factor`` times its own rate. Changes ``state``
        in place, unless it is ``in_use``: then ``state`` is a new one. Returns the optimizer's seconds.
        """
        free = [number for number, state in enumerate(self._states) if state not in in_use]
        number = free[0] if self.state in in_use else self._states.index(self.state)
        applied = self._connected.call(Apply(factor, number), StepApplied, deadline)
        self.state = self._states[number]
        return applied.seconds

    def compute(
        self,
        request: Compute,
        state: ModelState,  # noqa: ARG002 - a Worker's
        deadline: Deadline,  # noqa: ARG002
    ) -> tuple[Computed, Vector]:
        """Raise ProtocolError: a parameter server computes no gradients."""
        raise ProtocolError(f"{self.name} keeps the model, and computes no part of step {request.step}")

    def score(self, folder: str, deadline: Deadline) -> Score:
        """Score ``state`` on the held-out samples in ``folder``."""
        return self._connected.call(Evaluate(folder), Score, deadline)

    def momentum(self, deadline: Deadline) -> tuple[tuple[Tensor, ...], Vector]:
        """Return the optimizer's tensors and their values, float32 [size]."""
        self._connected.send(GetMomentum(), deadline)
        momentum = self._connected.expect(Momentum, deadline, payload=None)
        values = np.empty(momentum.size, np.float32)
        self._connected.receive_into(values.data, deadline)
        return momentum.tensors, values

    def restore(
        self, state: Vector, tensors: tuple[Tensor, ...], momentum: Vector, deadline: Deadline
    ) -> None:
        """Resume from a state and the optimizer's tensors of the same step."""
        self.state.values[:] = state
        self._connected.call(Restore(tensors), Ok, deadline, momentum.data)
