# SPDX-License-Identifier: Apache-2.0
"""Workers of a step: devices that send unasked replies, processes that hang or die."""

from __future__ import annotations

import gc
import mmap
import os
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, MillpondError, ProtocolError, RemoteError
from millpond.host.fleet import worker_user
from millpond.host.fleet.device import Device
from millpond.host.workers import worker as workers
from millpond.host.workers.dispatcher import Assignment, Dispatcher, WorkerAnswer, WorkerLoss
from millpond.host.workers.parameter_server import ParameterServer
from millpond.host.workers.worker import DeviceWorker, LocalWorker, ModelState
from millpond.linux import memory
from millpond.linux.zygote.client import Zygote
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.protocol import (
    Fetch,
    Folder,
    MissingFiles,
    Part,
    PrepareServer,
    PrepareWorker,
    Ready,
    Restore,
    Update,
    WarmUp,
    Work,
)
from millpond.train.state.layout import Tensor
from millpond.train.worker.start import WorkerFiles
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Message, Ok

from ..job_files import no_contents, written
from ..waiting import eventually
from .steps import DialledDevice, zero_state

SIZE = 6
WORK = WorkSpec("steps", ModelSpec("net:build", ("net.py",)))
NET_TENSORS = (Tensor("1.weight", (8, 64), "float32"), Tensor("1.bias", (8,), "float32"))
NET = """
import os
from torch import nn

def build(fail=""):
    if fail == "exit":
        os._exit(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
"""
Saying = Callable[[Channel, Work], None]


def soon() -> Deadline:
    return Deadline.after(60)


class Board(DialledDevice):
    """A device that says ``says`` to each Work, and ``parts`` to each Fetch."""

    def __init__(self, says: Saying, parts: Callable[[Channel, Fetch], None]) -> None:
        super().__init__()
        self._says, self._parts = says, parts

    def answer(self, host: Channel) -> None:
        request = host.receive(soon()).message
        if isinstance(request, Fetch):
            self._parts(host, request)
        elif isinstance(request, Work):
            host.receive_payload(4 * SIZE, soon())
            self._says(host, request)
        else:
            host.send(Ok() if isinstance(request, WarmUp) else MissingFiles(()), soon())
            if not isinstance(request, WarmUp):
                host.send(Ready((10,), token=b"the token"), soon())


VALUES = np.arange(SIZE, dtype=np.float32)


def answer(
    exchange: int = 0, samples: int = 0, largest: float = SIZE - 1, metrics: Sequence[str] = ("loss",)
) -> Saying:
    """Return an honest answer, but for what is added."""

    def say(host: Channel, request: Work) -> None:
        counted = request.samples + samples
        head = (request.exchange + exchange, counted, counted, largest, 10.0)
        host.send(Update(*head, 0.1, 0.0, 0, dict.fromkeys(metrics, (1.0, 1.0))), soon())

    return say


def part(start: int = 0, size: int = SIZE) -> Callable[[Channel, Fetch], None]:
    """Return an honest part, but for its start and size."""

    def say(host: Channel, _request: Fetch) -> None:
        host.send(Part(start), soon(), VALUES[:size].tobytes())

    return say


HONEST = part()
TRAIN = Work(7, 1, 1, (((2, 5),),))
SCORE = Work(7, 1, 1, (), held_out=True)


def message(said: Message, payload: bytes = b"") -> Callable[[Channel, Message], None]:
    return lambda host, request: host.send(said, soon(), payload)


def breaking(host: Channel, request: Message) -> None:
    host.sock.sendall(b"no message of millpond's at all")
    host.shut_down()


def request_of(_deadline: Deadline) -> PrepareWorker:
    return PrepareWorker(WORK, "csd0", (Folder("private", "csd0"),), {}, (Tensor("w", (SIZE,), "float32"),))


def device_worker(board: Board) -> DeviceWorker:
    return DeviceWorker(cast(Device, board), request_of, no_contents)


def event_of(
    says: Saying, parts: Callable[[Channel, Fetch], None] = HONEST, request: Work = TRAIN
) -> tuple[WorkerAnswer | WorkerLoss, str]:
    """Return the event of one task, and the error of reading its update."""
    board, events = Board(says, parts), queue.SimpleQueue[WorkerAnswer | WorkerLoss]()
    worker = device_worker(board)
    assert worker.prepare(soon()).samples == 10
    dispatcher = Dispatcher(0, worker, events)
    dispatcher.begin(Assignment(request, zero_state(SIZE)))
    error = ""
    try:
        event = events.get(timeout=30)
        if isinstance(event, WorkerAnswer):
            try:
                for _ in range(2):  # from the beginning again
                    found = np.empty(SIZE, np.float32)
                    worker.fetch(SIZE, soon())
                    worker.read(found, soon())
                    assert np.array_equal(found, VALUES)
            except RemoteError as problem:
                error = str(problem)
        return event, error
    finally:
        dispatcher.end()
        worker.close()
        assert board.ended()


def test_an_honest_device() -> None:
    event, error = event_of(answer())
    assert isinstance(event, WorkerAnswer) and error == ""
    assert (event.update.exchange, event.update.samples, event.task.samples) == (7, 3, 3)
    assert event.seconds > 0 and not event.dispatcher.worker.holds


@pytest.mark.parametrize(
    ("says", "reason", "for_good"),
    [
        (answer(exchange=1), "csd0 answered another exchange than the one it was asked for", False),
        (answer(exchange=-1), "csd0 answered another exchange than the one it was asked for", False),
        (answer(samples=1), "csd0 answered another exchange than the one it was asked for", False),
        (answer(samples=10**9), "csd0 answered another exchange than the one it was asked for", False),
        (answer(largest=float("nan")), "update refused: a value is not finite", True),
        (answer(largest=1e9), "update refused: a value is beyond 65536 per sample", True),
        (answer(metrics=["name of a patient"]), "csd0 sent metrics name of a patient", False),
        (answer(metrics=["loss", "accuracy"]), "csd0 sent metrics loss, accuracy", False),
        (answer(metrics=[]), "csd0 sent metrics ", False),
        (message(Ok()), "csd0 sent 'ok' where 'update' belongs", False),
        (message(Failure("worker", "it died")), "it died", False),
        (message(Failure("state", "policy.answers_per_state: ...")), "policy.answers_per", False),
        (message(Failure("model", "ValueError")), "ValueError", True),
        (message(Failure("policy", "policy.least_samples: ...")), "policy.least_samples", True),
        (message(Failure("data", "no sample"), b"more"), "csd0 sent 4 bytes behind 'failure'", False),
        (breaking, "csd0 does not speak millpond's protocol", False),
    ],
)
def test_a_device_that_says_anything_else_is_lost(says: Saying, reason: str, for_good: bool) -> None:
    event, _ = event_of(says)
    assert isinstance(event, WorkerLoss)
    assert event.reason.startswith(reason)
    assert event.for_good is for_good


def test_a_score_has_few_metrics_with_short_names() -> None:
    names = [f"recall_{number}" for number in range(31)]
    event, _ = event_of(answer(samples=9, metrics=["loss", *names]), request=SCORE)
    assert isinstance(event, WorkerAnswer) and event.update.samples == 9
    assert set(event.update.metrics) == {"loss", *names}


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (answer(samples=-1), "csd0 answered another exchange than the one it was asked for"),
        (answer(metrics=["name of a patient"]), "csd0 sent metrics name of a patient"),
        (answer(metrics=[33 * "a"]), "csd0 sent metrics aaa"),
        (answer(metrics=[f"a{number}" for number in range(33)]), "csd0 sent metrics a0, a1, "),
    ],
)
def test_a_score_that_says_anything_else_is_lost(says: Saying, reason: str) -> None:
    event, _ = event_of(says, request=SCORE)
    assert isinstance(event, WorkerLoss) and event.reason.startswith(reason)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (part(start=1), "csd0 sent values 1 where 0 belong"),
        (part(size=SIZE - 1), "csd0 sent 20 bytes behind 'part', not 24"),
        (message(Ok()), "csd0 sent 'ok' where 'part' belongs"),
        (message(Failure("worker", "it died")), "csd0: it died"),
        (breaking, "csd0 does not speak millpond's protocol"),
    ],
)
def test_a_device_that_sends_another_part_is_found(
    parts: Callable[[Channel, Fetch], None], reason: str
) -> None:
    _, error = event_of(answer(), parts)
    assert error.startswith(reason)


def test_a_device_that_is_given_up_before_it_is_dialled_stays_so() -> None:
    board = Board(answer(), part())
    worker = device_worker(board)
    worker.close()
    with pytest.raises(ConnectionLost, match="given up"):
        worker.prepare(soon())
    with pytest.raises(ProtocolError, match="not prepared"):
        worker.train(Work(1, 1, 1, (((1, 2),),)), zero_state(6), soon())
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

    def process(fail: str = "", kept: Path | None = None) -> LocalWorker:
        arguments = {"fail": fail} if fail else {}
        work = replace(WORK, model=ModelSpec("net:build", ("net.py",), arguments=arguments))
        folders = (Folder(str(folder), "csd0", public=True),)
        request = PrepareWorker(work, "host", folders, {}, NET_TENSORS, states=3)
        files = WorkerFiles(written({"net.py": NET}, tmp_path / "code"))
        made.append(
            LocalWorker(request, files, [folder], tmp_path / "host.log", zygote, states.descriptor, kept)
        )
        return made[-1]

    yield process
    own = [child for child in psutil.Process().children(recursive=True) if child not in before]
    while made:
        made[-1].close()
        made.pop().close()  # twice is once
    assert not psutil.wait_procs(own, 10)[1]
    gc.collect()  # a mapping has a descriptor of its own
    eventually(lambda: psutil.Process().num_fds() <= descriptors, "the descriptors are closed", 10)


def numbered(states: memory.SharedBuffer, number: int = 0) -> ModelState:
    return ModelState(states.part(number * 4 * 520, 4 * 520))


def train(
    worker: LocalWorker, states: memory.SharedBuffer, exchange: int = 1, state: int = 0
) -> tuple[Update, bytes]:
    update = worker.train(Work(exchange, 1, 1, (((3, 5),),)), numbered(states, state), soon())
    values = np.empty(520, np.float32)
    worker.fetch(520, soon())
    for part in (values[:100], values[100:]):
        worker.read(part, soon())
    return update, values.tobytes()


@pytest.mark.skipif(not worker_user.is_separate(), reason="only root starts workers of another user")
def test_a_process_is_of_a_user_of_its_own_and_keeps_state(start: Start, folder: Path) -> None:
    kept = folder.parent / "kept"
    (kept / "below").mkdir(parents=True)
    worker = start(kept=kept)
    worker.prepare(soon())
    process = psutil.Process(worker.pid)
    inner = [process, *process.children(recursive=True)][-1]
    assert set(inner.uids()) == set(inner.gids()) == {worker_user.UID}
    status = Path(f"/proc/{inner.pid}/status").read_text()
    assert "CapEff:\t0000000000000000" in status and "Groups:\t \n" in status
    assert {path.stat().st_uid for path in (kept, kept / "below")} == {worker_user.UID}


def test_a_process_computes_at_the_state_that_it_is_given(start: Start, states: memory.SharedBuffer) -> None:
    worker = start()
    worker.prepare(soon())
    at_zeros = train(worker, states)
    numbered(states, 2).values[:] = np.random.default_rng(1).normal(size=520)
    elsewhere = train(worker, states, state=2)
    assert elsewhere[1] != at_zeros[1] and elsewhere[0].metrics != at_zeros[0].metrics
    numbered(states).values[:] = numbered(states, 2).values  # the parameter server goes on in the same memory
    assert train(worker, states)[1] == elsewhere[1]
    assert train(worker, states, state=1)[1] == at_zeros[1]


def test_a_process_that_stops_in_a_step_is_given_up(start: Start, states: memory.SharedBuffer) -> None:
    worker = start()
    ready = worker.prepare(soon())
    assert ready == Ready((20,), (0,))
    update, values = train(worker, states)
    assert update.samples == 2 and update.metrics == {"loss": (pytest.approx(2 * np.log(8), rel=1e-4), 2)}
    assert train(worker, states, 2)[1] == values
    outermost = psutil.Process(worker.pid)  # for a user not the one that computes
    for process in (outermost, *outermost.children(recursive=True)):
        process.suspend()
    with pytest.raises(ConnectionLost, match="the worker 'host' hangs: it neither computes nor reads"):
        train(worker, states)


def test_a_process_that_hangs_does_not_keep_what_it_is_sent_waiting(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a socket holds: the send blocks before any answer is waited for."""
    worker = start()
    worker.prepare(soon())
    for process in (psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)):
        process.suspend()
    monkeypatch.setattr(workers, "REPLY_SECONDS", 0.1)
    monkeypatch.setattr(workers, "SLOWEST", 1e9)
    with pytest.raises(MillpondError):
        worker._call(Restore(()), Ok, bytes(64 << 20))


def test_a_process_that_is_killed_is_a_loss(start: Start, states: memory.SharedBuffer) -> None:
    worker, events = start(), queue.SimpleQueue[WorkerAnswer | WorkerLoss]()
    worker.prepare(soon())
    dispatcher = Dispatcher(0, worker, events)
    os.kill(worker.pid, signal.SIGKILL)
    dispatcher.begin(Assignment(Work(1, 1, 1, (((3, 4),),)), numbered(states)))
    loss = events.get(timeout=30)
    assert isinstance(loss, WorkerLoss) and not loss.for_good
    assert "the worker 'host' on the host" in loss.reason


def test_a_process_that_dies_while_it_prepares_names_its_log(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match=f"died; {tmp_path / 'host.log'} may say why"):
        start("exit").prepare(soon())


@pytest.fixture
def server(folder: Path, tmp_path: Path, zygote: Zygote) -> Iterator[ParameterServer]:
    optimizer = OptimizerSpec("sgd", 0.05, {"momentum": 0.9})
    request = PrepareServer(replace(WORK, optimizer=optimizer), states=3)
    states = memory.make("states")
    files = WorkerFiles(written({"net.py": NET}, tmp_path / "code"))
    process = ParameterServer(request, files, [folder], tmp_path / "log", zygote, states)
    try:
        process.prepare(soon())
        assert process.tensors == NET_TENSORS
        process.mean[:] = 1.0
        yield process
    finally:
        process.close()
        os.close(states)


def test_a_keeper_steps_scores_and_goes_on(server: ParameterServer, folder: Path) -> None:
    first = server.state.values.copy()
    assert server.apply(1.0, 1, set()) > 0
    after = server.state.values.copy()
    assert np.allclose(after, first - 0.05, atol=1e-6)
    score = server.score(str(folder), {"recall": (3.0, 4.0)})
    assert set(score.host) == {"accuracy", "loss"} and score.devices == {"recall": 0.75}
    assert server.score("", {}).host == {} and np.array_equal(server.model()[1], after)
    tensors, momentum = server.momentum()
    server.apply(0.5, 1, set())
    last = server.state.values.copy()
    server.restore(after, tensors, momentum)
    server.apply(0.5, 1, set())
    assert np.array_equal(server.state.values, last) and not np.array_equal(last, after)


def test_states_that_are_held_do_not_change(server: ParameterServer) -> None:
    held, values = set[ModelState](), list[bytes]()
    for _ in range(2):
        held.add(server.state)
        values.append(server.state.values.tobytes())
        server.apply(1.0, 1, held)
        assert server.state not in held
    assert [state.values.tobytes() for state in sorted(held, key=lambda state: state.memory.start)] == values
    third = server.state
    server.apply(1.0, 1, held)
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
    read = memory.map_read_only(descriptor, 3 * 4 * 520)
    assert np.array_equal(np.frombuffer(read[: 4 * 520], np.float32), before)
    server.apply(1.0, 1, set())
    assert np.array_equal(np.frombuffer(read[: 4 * 520], np.float32), server.state.values)
    assert not np.array_equal(server.state.values, before)
