# SPDX-License-Identifier: Apache-2.0
"""Workers of a step: devices that send unasked replies, processes that hang or die."""

from __future__ import annotations

import gc
import mmap
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, RemoteError
from millpond.host.fleet.device import Device
from millpond.host.workers.dispatcher import Dispatcher, GradientTask, WorkerAnswer, WorkerLoss
from millpond.host.workers.parameter_server import ParameterServer
from millpond.host.workers.worker import DeviceWorker, LocalWorker, ModelState
from millpond.linux import memory
from millpond.linux.zygote.client import Zygote
from millpond.train.job.spec import DataSpec, Job, ModelSpec, SynchronousSpec
from millpond.train.protocol import Compute, Computed, PrepareWorker, Ready
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Message, Ok

from .steps import zero_state

SIZE = 6
JOB = Job(
    "steps", DataSpec("private", "test"), ModelSpec("net:build", ("net.py",)), synchronous=SynchronousSpec()
)
NET = """
import fcntl
import os
from torch import nn

def build(fail=""):
    if fail == "exit":
        os._exit(3)
    if fail == "seal":
        links = {name: "/proc/self/fd/" + name for name in os.listdir("/proc/self/fd")}
        shared = next(int(n) for n, l in links.items() if os.path.lexists(l) and "sums of" in os.readlink(l))
        fcntl.fcntl(shared, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
"""
Saying = Callable[[Channel, Compute], None]


def soon() -> Deadline:
    return Deadline.after(60)


class Board:
    """A device as ``DeviceWorker`` dials it. It says ``says`` to each Compute."""

    name = "csd0"

    def __init__(self, says: Saying) -> None:
        self._says = says
        self._threads: list[threading.Thread] = []

    def control(self, deadline: Deadline) -> Channel:
        return self._served(self._prepare)

    def bulk(self, token: bytes, tls: bool, deadline: Deadline) -> Channel:
        assert token == b"the token" and not tls
        return self._served(self._compute)

    def _served(self, serve: Callable[[Channel], None]) -> Channel:
        near, far = socket.socketpair()

        def run() -> None:
            with Channel(far, "the host") as host:
                try:
                    while True:
                        serve(host)
                except RemoteError:
                    return

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        return Channel(near, self.name)

    def _prepare(self, host: Channel) -> None:
        host.receive(soon())
        host.send(Ready(10, (), SIZE, parts=(10,), token=b"the token"), soon())

    def _compute(self, host: Channel) -> None:
        request = host.receive(soon()).message
        assert isinstance(request, Compute)
        host.receive_payload(4 * SIZE, soon())
        self._says(host, request)

    def ended(self) -> bool:
        for thread in self._threads:
            thread.join(10)
        return not any(thread.is_alive() for thread in self._threads)


def answer(step: int = 0, samples: int = 0, sums: int = SIZE) -> Saying:
    """An honest answer, but for what is added."""

    def say(host: Channel, request: Compute) -> None:
        computed = Computed(request.step + step, len(request.samples[0]) + samples, 1.0, 0.1, 0.0, 0)
        host.send(computed, soon(), np.arange(sums, dtype=np.float32).tobytes())

    return say


def message(said: Message, payload: bytes = b"") -> Saying:
    return lambda host, request: host.send(said, soon(), payload)


def breaking(host: Channel, request: Compute) -> None:
    host.sock.sendall(b"no message of millpond's at all")
    host.shut_down()


def event_of(says: Saying) -> WorkerAnswer | WorkerLoss:
    """What a link tells of one task."""
    board, events = Board(says), queue.SimpleQueue[WorkerAnswer | WorkerLoss]()
    worker = DeviceWorker(cast(Device, board), PrepareWorker(JOB, "csd0", ("private",), {}, role="steps"))
    assert worker.prepare(soon()).size == SIZE
    link = Dispatcher(0, worker, events)
    link.begin(GradientTask(Compute(7, 1, ((2, 3, 4),)), zero_state(SIZE)))
    try:
        return events.get(timeout=30)
    finally:
        link.end()
        worker.close()
        assert board.ended()


def test_an_honest_device() -> None:
    event = event_of(answer())
    assert isinstance(event, WorkerAnswer)
    assert (event.computed.step, event.computed.samples, event.task.samples) == (7, 3, 3)
    assert np.array_equal(event.sums, np.arange(SIZE, dtype=np.float32))
    assert event.seconds > 0


@pytest.mark.parametrize(
    ("says", "reason", "for_good"),
    [
        (answer(step=1), "csd0 answered another step than the one it was asked for", False),
        (answer(step=-1), "csd0 answered another step than the one it was asked for", False),
        (answer(samples=1), "csd0 answered another step than the one it was asked for", False),
        (answer(samples=10**9), "csd0 answered another step than the one it was asked for", False),
        (answer(sums=SIZE - 1), "csd0 sent 20 bytes behind 'computed', not 24", False),
        (answer(sums=10 * SIZE), "csd0 sent 240 bytes behind 'computed', not 24", False),
        (message(Ok()), "csd0 sent 'ok' where 'computed' belongs", False),
        (message(Failure("worker", "it died")), "csd0: it died", False),
        (message(Failure("model", "ValueError")), "csd0: ValueError", True),
        (message(Failure("data", "no sample"), b"more"), "csd0 sent 4 bytes behind 'failure'", False),
        (breaking, "csd0 does not speak millpond's protocol", False),
    ],
)
def test_a_device_that_says_anything_else_is_lost(says: Saying, reason: str, for_good: bool) -> None:
    event = event_of(says)
    assert isinstance(event, WorkerLoss)
    assert event.reason.startswith(reason)
    assert event.for_good is for_good


def test_a_device_that_is_given_up_before_it_is_dialled_stays_so() -> None:
    board = Board(answer())
    worker = DeviceWorker(cast(Device, board), PrepareWorker(JOB, "csd0", ("private",), {}, role="steps"))
    worker.close()
    with pytest.raises(ConnectionLost, match="given up"):
        worker.prepare(soon())
    with pytest.raises(ProtocolError, match="not prepared"):
        worker.compute(Compute(1, 1, ((1,),)), zero_state(6), soon())
    worker.close()
    assert board.ended()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A worker's samples."""
    (tmp_path / "samples").mkdir()
    rng = np.random.default_rng(1)
    np.save(tmp_path / "samples" / "images.npy", rng.integers(0, 255, (20, 8, 8)).astype(np.uint8))
    np.save(tmp_path / "samples" / "labels.npy", rng.integers(0, 8, 20))
    return tmp_path / "samples"


Start = Callable[..., LocalWorker]


@pytest.fixture
def states() -> Iterator[memory.SharedBuffer]:
    """Three states of the model, all zeros."""
    descriptor = memory.make("states of the tests")
    yield memory.map_first(descriptor, 3 * 4 * 520)
    os.close(descriptor)


@pytest.fixture
def start(folder: Path, tmp_path: Path, states: memory.SharedBuffer, zygote: Zygote) -> Iterator[Start]:
    """Worker processes, of which nothing is left."""
    before, made = psutil.Process().children(recursive=True), list[LocalWorker]()
    descriptors = psutil.Process().num_fds()

    def process(fail: str = "") -> LocalWorker:
        arguments = {"fail": fail} if fail else {}
        job = Job(
            "steps", JOB.data, ModelSpec("net:build", ("net.py",), arguments), synchronous=SynchronousSpec()
        )
        request = PrepareWorker(job, "host", (str(folder),), {"net.py": NET}, role="steps", states=3)
        made.append(LocalWorker(request, [folder], tmp_path / "host.log", zygote, states.descriptor))
        return made[-1]

    yield process
    own = [child for child in psutil.Process().children(recursive=True) if child not in before]
    while made:
        made[-1].close()
        made.pop().close()  # twice is once
    assert not psutil.wait_procs(own, 10)[1]
    gc.collect()  # a mapping has a descriptor of its own
    assert psutil.Process().num_fds() <= descriptors


def numbered(states: memory.SharedBuffer, number: int = 0) -> ModelState:
    return ModelState(states.part(number * 4 * 520, 4 * 520))


def compute(
    worker: LocalWorker, states: memory.SharedBuffer, step: int = 1, state: int = 0
) -> tuple[Computed, bytes]:
    computed, sums = worker.compute(Compute(step, 1, ((3, 4),)), numbered(states, state), soon())
    return computed, sums.tobytes()


def test_a_process_computes_at_the_state_that_it_is_given(start: Start, states: memory.SharedBuffer) -> None:
    worker = start()
    worker.prepare(soon())
    at_zeros = compute(worker, states)
    numbered(states, 2).values[:] = np.random.default_rng(1).normal(size=520)
    elsewhere = compute(worker, states, state=2)
    assert elsewhere[1] != at_zeros[1] and elsewhere[0].loss != at_zeros[0].loss
    numbered(states).values[:] = numbered(states, 2).values  # the parameter server goes on in the same memory
    assert compute(worker, states)[1] == elsewhere[1]
    assert compute(worker, states, state=1)[1] == at_zeros[1]


def test_a_process_that_stops_in_a_step_is_given_up(start: Start, states: memory.SharedBuffer) -> None:
    worker = start()
    ready = worker.prepare(soon())
    assert (ready.parts, ready.size) == ((20,), 520)
    computed, sums = compute(worker, states)
    assert computed.samples == 2 and computed.loss == pytest.approx(2 * np.log(8), rel=1e-4)
    assert compute(worker, states, 2)[1] == sums
    outermost = psutil.Process(worker.pid)  # for a user not the one that computes
    for process in (outermost, *outermost.children(recursive=True)):
        process.suspend()
    with pytest.raises(ConnectionLost, match="the worker 'host' hangs: it does not use its processor"):
        compute(worker, states)


def test_a_process_that_is_killed_is_a_loss(start: Start, states: memory.SharedBuffer) -> None:
    worker, events = start(), queue.SimpleQueue[WorkerAnswer | WorkerLoss]()
    worker.prepare(soon())
    link = Dispatcher(0, worker, events)
    os.kill(worker.pid, signal.SIGKILL)
    link.begin(GradientTask(Compute(1, 1, ((3,),)), numbered(states)))
    loss = events.get(timeout=30)
    assert isinstance(loss, WorkerLoss) and not loss.for_good
    assert "the worker 'host' on the host" in loss.reason


def test_a_process_that_dies_while_it_prepares_names_its_log(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match=f"died; {tmp_path / 'host.log'} may say why"):
        start("exit").prepare(soon())


def test_memory_that_cannot_be_kept_is_not_used(start: Start) -> None:
    with pytest.raises(ProtocolError, match="'host' on the host: the shared memory cannot be kept"):
        start("seal").prepare(soon())


@pytest.fixture
def server(folder: Path, tmp_path: Path, zygote: Zygote) -> Iterator[ParameterServer]:
    request = PrepareWorker(JOB, "parameter-server", (), {"net.py": NET}, role="parameter_server", states=3)
    states = memory.make("states")
    process = ParameterServer(request, [folder], tmp_path / "log", zygote, states)
    try:
        process.prepare(soon())
        process.begin(soon())
        process.mean[:] = 1.0
        yield process
    finally:
        process.close()
        os.close(states)


def test_a_keeper_steps_scores_and_goes_on(server: ParameterServer, folder: Path) -> None:
    first = server.state.values.copy()
    assert server.apply(1.0, set(), soon()) > 0
    after = server.state.values.copy()
    assert np.allclose(after, first - 0.05, atol=1e-6)
    assert server.score(str(folder), soon()).samples == 20
    tensors, momentum = server.momentum(soon())
    server.apply(0.5, set(), soon())
    last = server.state.values.copy()
    server.restore(after, tensors, momentum, soon())
    server.apply(0.5, set(), soon())
    assert np.array_equal(server.state.values, last) and not np.array_equal(last, after)


def test_states_that_are_held_do_not_change(server: ParameterServer) -> None:
    held, values = set[ModelState](), list[bytes]()
    for _ in range(2):
        held.add(server.state)
        values.append(server.state.values.tobytes())
        server.apply(1.0, held, soon())
        assert server.state not in held
    assert [state.values.tobytes() for state in sorted(held, key=lambda state: state.memory.start)] == values
    third = server.state
    server.apply(1.0, held, soon())
    assert server.state is third
    first = float(np.frombuffer(values[0], np.float32)[0])
    momentum = 1 + 1.9 + 2.71  # of 0.9, over three steps at a rate of 0.05
    assert third.values[0] == pytest.approx(first - 0.05 * momentum, abs=1e-6)


def test_nobody_else_can_write_to_the_states_of_a_keeper(server: ParameterServer) -> None:
    descriptor = server.state.memory.shared.descriptor
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, bytes(4), 0)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 4 * 520)
    before = server.state.values.copy()
    read = memory.map_private(descriptor, 3 * 4 * 520)
    assert np.array_equal(np.frombuffer(read.data[: 4 * 520], np.float32), before)
    server.apply(1.0, set(), soon())
    assert np.array_equal(np.frombuffer(read.data[: 4 * 520], np.float32), server.state.values)
    assert not np.array_equal(server.state.values, before)
