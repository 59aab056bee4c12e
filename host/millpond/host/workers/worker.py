# SPDX-License-Identifier: Apache-2.0
"""Edge: workers as the daemon sees them, with one interface on a device and on the host itself."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, ProtocolError
from millpond.host.fleet.device import Device
from millpond.linux import memory
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandboxed_process import end
from millpond.linux.progress import HANG_SECONDS, processor_time
from millpond.linux.zygote.client import Zygote
from millpond.train.protocol import (
    Compute,
    Computed,
    Evaluate,
    GetInitial,
    Initial,
    PrepareWorker,
    Ready,
    Score,
    Train,
    Trained,
)
from millpond.train.reduce.exact import Vector
from millpond.train.worker.start import start_worker
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits

LOCAL_LIMITS = Limits(head=4 << 20, payload=1 << 34)


@dataclass(frozen=True, slots=True, eq=False)
class ModelState:
    """A model's state in shared memory. It does not change during a task that computes at it."""

    memory: memory.SharedSlice

    @property
    def values(self) -> Vector:
        """The state as float32 [size]."""
        return np.frombuffer(self.memory.data, np.float32)

    @property
    def number(self) -> int:
        """The index of the state in its shared memory."""
        return self.memory.start // self.memory.size


class Worker(Protocol):
    """A process that trains: prepares once, then trains round after round. Every call may raise RemoteError;
    then close it.
    """

    name: str

    def prepare(self, deadline: Deadline) -> Ready:
        """Build the model and load the data."""

    def train(self, round_number: int, state: Vector, deadline: Deadline) -> Trained:
        """Train from ``state``. The new state must then be received with ``receive_state``."""

    def receive_state(self, into: Vector, deadline: Deadline) -> None:
        """Receive the state that ``train`` has announced."""

    def compute(self, request: Compute, state: ModelState, deadline: Deadline) -> tuple[Computed, Vector]:
        """Compute gradients at ``state``. Returns their sums, valid until the next call."""

    def close(self) -> None:
        """End the worker."""


class _ChannelWorker:
    """A worker behind a channel that carries requests and parameters."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._channel: Channel | None = None
        self._size = 0

    def train(self, round_number: int, state: Vector, deadline: Deadline) -> Trained:
        """See Worker."""
        channel = self._connected
        channel.send(Train(round_number), deadline, state.data)
        trained = channel.expect(Trained, deadline, payload=4 * self._size)
        if trained.round != round_number:
            raise ProtocolError(f"{self.name} answered round {trained.round} in round {round_number}")
        return trained

    def receive_state(self, into: Vector, deadline: Deadline) -> None:
        """See Worker."""
        self._connected.receive_into(into.data, deadline)

    @property
    def _connected(self) -> Channel:
        if self._channel is None:
            raise ProtocolError(f"{self.name} is not prepared")
        return self._channel


class DeviceWorker(_ChannelWorker):
    """A worker on a device. The agent ends the worker when the control connection ends."""

    def __init__(self, device: Device, request: PrepareWorker) -> None:
        super().__init__(device.name)
        self._device, self._request = device, request
        self._control: Channel | None = None
        self._sums: Vector | None = None
        self._closed = False

    def prepare(self, deadline: Deadline) -> Ready:
        """See Worker."""
        self._control = self._device.control(deadline)
        self._check_open()
        ready = self._control.call(self._request, Ready, deadline)
        self._channel = self._device.bulk(ready.token, ready.tls, deadline)
        self._check_open()
        self._size = ready.size
        return ready

    def compute(self, request: Compute, state: ModelState, deadline: Deadline) -> tuple[Computed, Vector]:
        """See Worker."""
        channel = self._connected
        if self._sums is None:  # only now it is known that the size is the model's
            self._sums = np.empty(self._size, np.float32)
        channel.send(request, deadline, state.memory)
        computed = channel.expect(Computed, deadline, payload=4 * self._size)
        channel.receive_into(self._sums.data, deadline)
        return _checked(computed, request, self.name), self._sums

    def _check_open(self) -> None:
        if self._closed:  # while it was dialling
            raise ConnectionLost(f"{self.name}: given up")

    def close(self) -> None:
        """See Worker."""
        self._closed = True
        for channel in (self._channel, self._control):
            if channel:
                channel.close()


class HostProcess(_ChannelWorker):
    """A process of a job on the host, a fork of ``zygote``. It runs a user's model, so it can read only
    ``readable`` and programs, and has no network and no capabilities. ``states`` is the descriptor of the
    memory in which a synchronous job's parameter server has its states.
    """

    def __init__(
        self,
        request: PrepareWorker,
        readable: Sequence[Path],
        log: Path,
        zygote: Zygote,
        states: int | None = None,
    ) -> None:
        super().__init__(request.worker)
        self._request, self._log = request, log
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as failed, theirs:
            failed.callback(ours.close)
            self._shared: tuple[int, ...] = ()
            if states is not None:
                self._shared = (states, memory.make(f"sums of {request.worker}"))
                weakref.finalize(self, os.close, self._shared[1])
            self._process = start_worker(
                zygote, _sandbox(readable), log, theirs.fileno(), self._shared, "--errors", "full"
            )
            failed.pop_all()
        self._channel = Channel(ours, f"the worker '{self.name}' on the host", limits=LOCAL_LIMITS)

    def prepare(self, deadline: Deadline) -> Ready:
        """See Worker."""
        try:
            ready = self._connected.call(self._request, Ready, deadline)
        except ConnectionLost:
            raise ConnectionLost(f"the worker process on the host died; {self._log} may say why") from None
        self._size = ready.size
        try:
            if self._shared:
                self._map()
        except (OSError, ValueError) as error:
            raise ProtocolError(f"the worker '{self.name}' on the host: {error}") from None
        return ready

    @property
    def pid(self) -> int:
        """The process id of the outermost process of the sandbox."""
        return self._process.pid

    def _map(self) -> None:
        """Map the vectors that the process shares. Raises ValueError if their sizes are wrong."""
        raise NotImplementedError

    def close(self) -> None:
        """See Worker."""
        self._connected.close()
        end(self._process)


class LocalWorker(HostProcess):
    """A worker on the host. In a federated job it also makes the first state and scores averages."""

    def _map(self) -> None:
        self._sums = np.frombuffer(memory.map_second(self._shared[1], 4 * self._size).data, np.float32)

    def compute(self, request: Compute, state: ModelState, deadline: Deadline) -> tuple[Computed, Vector]:
        """See Worker."""
        self._connected.send(replace(request, state=state.number), deadline)
        self._wait_while_busy(deadline)
        computed = self._connected.expect(Computed, deadline)
        return _checked(computed, request, self.name), self._sums

    def initial(self, into: Callable[[int], Vector], deadline: Deadline) -> Vector:
        """Receive the seeded first state into the vector that ``into`` makes for its size."""
        state = into(self._size)
        self._connected.send(GetInitial(), deadline)
        self._connected.expect(Initial, deadline, payload=4 * self._size)
        self.receive_state(state, deadline)
        return state

    def evaluate(self, state: Vector, folder: str, deadline: Deadline) -> Score:
        """Score ``state`` on the held-out samples in ``folder``."""
        self._connected.send(Evaluate(folder), deadline, state.data)
        return self._connected.expect(Score, deadline)

    def _wait_while_busy(self, deadline: Deadline) -> None:
        seen = None
        poll = select.poll()
        poll.register(self._connected.sock, select.POLLIN)
        while not poll.poll(1000 * HANG_SECONDS):
            deadline.remaining()
            now = processor_time(self._process.pid)
            if now is not None and now == seen:
                raise ConnectionLost(f"the worker '{self.name}' hangs: it does not use its processor")
            seen = now


def _sandbox(readable: Sequence[Path]) -> Sandbox:
    return Sandbox(
        binds=(*system_binds(), *python_binds(), *(Bind(path, path) for path in readable)),
        own_network=True,
        own_pids=True,
        capabilities=False,
    )


def _checked(computed: Computed, request: Compute, name: str) -> Computed:
    if (computed.step, computed.samples) != (request.step, sum(map(len, request.samples))):
        raise ProtocolError(f"{name} answered another step than the one it was asked for")
    return computed
