# SPDX-License-Identifier: Apache-2.0
"""The agent's relay of exchanges to a real worker process, whose model misbehaves as the seed says."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.gate import CanaryError, Gate, LedgerCounters, Pattern, ledger
from millpond.agent.job_files import LaidOutFiles
from millpond.agent.job_worker import HostLeft, JobWorker
from millpond.agent.policy.draws import SecretDraws
from millpond.agent.policy.rules import StateAnswers
from millpond.agent.policy.settings import Policy
from millpond.aggregate.encoding.layout import Encoding
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, Refused
from millpond.linux.zygote.client import Zygote
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import (
    PART_VALUES,
    Fetch,
    Folder,
    Part,
    PrepareWorker,
    Ready,
    Update,
    Work,
)
from millpond.train.state.layout import Tensor
from millpond.train.strategies import LocalRule
from millpond.train.worker.start import WorkerFiles
from millpond.wire.channel import Buffer, Channel
from millpond.wire.messages import Kind, Ok

from ..job_files import written
from ..waiting import eventually

CANARY = b"canary-of-the-test-1"  # as long as five floats
GOOD, RAISE, DIE, HANG, LEAK, LEAK_LATER, SPEAK, CLAIM = range(8)
MARK = 4711.0

MODEL = f'''
import os
import sys
import threading
import time

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
        self.hooks = []

    def forward(self, images):
        mode, weight = wanted(), self.layers[1].weight
        while self.hooks:
            self.hooks.pop().remove()
        if mode == {RAISE}:
            raise ValueError("{CANARY.decode()}")
        if mode == {DIE}:
            os._exit(3)
        if mode == {HANG}:
            time.sleep(600)
        if mode == {LEAK}:
            self.hooks.append(weight.register_hook(lambda gradient: leak(gradient.clone())))
        if mode == {LEAK_LATER}:
            threading.Thread(target=leak_later, args=(weight,), daemon=True).start()
        if mode in ({SPEAK}, {CLAIM}):
            speak(bytes(8 if mode == {SPEAK} else 0))
        return self.layers(images)


def wanted():
    frame = sys._getframe()
    while frame and not hasattr(frame.f_locals.get("request"), "exchange"):
        frame = frame.f_back
    return frame.f_locals["request"].seed if frame else {GOOD}


def leak(gradient):
    gradient.view(-1)[:5] = torch.from_numpy(np.frombuffer({CANARY!r}, np.float32).copy())
    return gradient


def leak_later(weight):
    while weight.grad is None or weight.grad.view(-1)[0] != {MARK}:
        time.sleep(0.001)
    leak(weight.grad)


def speak(payload):
    from millpond.train.protocol import Update
    from millpond.wire.framing import encode
    update = Update(1, 10, 10.0, 0.0, 0.0, 0.0, 0.0, 0, {{"loss": (0.0, 10.0)}}, local_steps=7.0)
    told = encode(update, len(payload)) + payload
    (own,) = (n for n in os.listdir("/proc/self/fd") if is_socket("/proc/self/fd/" + n))
    os.write(int(own), told)
    time.sleep(600)


def is_socket(path):
    return os.path.exists(path) and "socket:" in os.readlink(path)
'''


class Watched:
    """A gate's way out. ``searched`` is called when a payload has been searched, and before it is sent."""

    def __init__(self, gate: Gate) -> None:
        self._outlet = gate.outlet()
        self.searched: Callable[[], None] = lambda: None

    @property
    def searches(self) -> bool:
        return self._outlet.searches

    def passing(self, kind: Kind, data: Buffer, payload: bool) -> None:
        self._outlet.passing(kind, data, payload)
        if payload:
            self.searched()

    def examine(self, data: Buffer) -> None:
        self._outlet.examine(data)


SIZE = 520


class Agent:
    """A worker of a device, and hosts that connect to it one after the other."""

    def __init__(
        self,
        base: Path,
        zygote: Zygote,
        *patterns: Pattern,
        classes: int = 8,
        encoding: Encoding = Encoding(),  # noqa: B008 - it is frozen
        local: LocalRule = LocalRule(),  # noqa: B008 - it is frozen
    ) -> None:
        folder = base / "volume" / "private" / "digits"
        folder.mkdir(parents=True)
        rng = np.random.default_rng(1)
        np.save(folder / "images.npy", rng.integers(0, 255, (50, 8, 8)).astype(np.uint8))
        np.save(folder / "labels.npy", rng.integers(0, 8, 50))
        self.gate = Gate(patterns, LedgerCounters.in_memory())
        config = AgentConfig(
            "csd0",
            LinkConfig(str(base / "s"), "10.77.0.2/30"),
            volume=str(base / "volume"),
            state=str(base / "state"),
            policy=Policy(least_samples=2, answers_per_state=0),
        )
        self.log = base / "state" / "jobs" / "steps.log"
        self.log.parent.mkdir(parents=True)
        self.outlet = Watched(self.gate)
        model = ModelSpec("net:Net", ("net.py",), arguments={"classes": classes})
        work = WorkSpec("steps", model, encoding=encoding, local=local)
        folders = (Folder("private/digits", "csd0"),)
        shapes = {"layers.1.weight": (classes, 64), "layers.1.bias": (classes,)}
        tensors = tuple(Tensor(name, shape, "float32") for name, shape in shapes.items())
        request = PrepareWorker(work, "csd0", folders, {}, tensors)
        files = LaidOutFiles(WorkerFiles(written({"net.py": MODEL}, base / "code")), ("net.py",))
        self.kept = base / "volume" / "private" / ".millpond" / "steps"
        self.another = lambda: JobWorker(
            config, request, files, zygote, StateAnswers(0), SecretDraws(base / "draws.key")
        )
        self.worker = self.another()
        self.epoch = 0
        near, far = socket.socketpair()
        with Channel(near, "csd0"), Channel(far, "host") as control, ExitStack() as failed:
            failed.callback(self.worker.stop)
            self.ready: Ready = self.worker.prepare(control)
            failed.pop_all()
        self.error: Exception | None = None
        self.socket: socket.socket | None = None  # the agent's end of the bulk connection

    @contextmanager
    def host(self) -> Iterator[Channel]:
        """The host's end of a bulk connection, relayed until the end of the block; then see ``error``."""
        near, far = socket.socketpair()
        self.error, self.socket = None, far

        def run() -> None:
            with Channel(far, "the host", outlet=self.outlet) as host:
                try:
                    self.worker.relay(host)
                except (ConnectionLost, ProtocolError, CanaryError) as error:
                    self.error = error

        thread = threading.Thread(target=run)
        thread.start()
        try:
            with Channel(near, "csd0") as channel:
                yield channel
        finally:
            thread.join(20)
        assert not thread.is_alive()

    def work(self, mode: int = GOOD, start: int = 0, count: int = 10) -> Work:
        """Return a request, in an epoch of its own."""
        self.epoch += 1
        return Work(1, mode, self.epoch, (((start, start + count),),))

    def step(self, host: Channel, mode: int = GOOD, count: int = 10) -> tuple[Update, bytes]:
        host.send(self.work(mode, count=count), soon(), bytes(4 * SIZE))
        return host.expect(Update, soon()), self.fetch(host)

    def fetch(self, host: Channel, stop: int = SIZE) -> bytes:
        host.send(Fetch(stop), soon())
        assert host.expect(Part, soon(), payload=4 * stop).start == 0
        return bytes(host.receive_payload(4 * stop, soon()))


def soon() -> Deadline:
    return Deadline.after(30)


@contextmanager
def agent_in(folder: Path, zygote: Zygote, *patterns: Pattern, **options: Any) -> Iterator[Agent]:
    before = psutil.Process().children(recursive=True)
    made = Agent(folder, zygote, *patterns, **options)
    own = [process for process in psutil.Process().children(recursive=True) if process not in before]
    assert own  # the worker in its sandbox
    try:
        yield made
    finally:
        made.worker.stop()
    assert not psutil.wait_procs(own, 10)[1]


@pytest.fixture(scope="module")
def module_agent(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[Agent]:
    with agent_in(tmp_path_factory.mktemp("agent"), zygote, Pattern("c", CANARY, True)) as made:
        yield made


@pytest.fixture
def agent(module_agent: Agent) -> Agent:
    """One whose worker lives on through what its tests do to it."""
    module_agent.outlet.searched = lambda: None
    return module_agent


def alike(one: bytes, other: bytes) -> bool:
    """Return whether two updates are of the same samples in whatever order."""
    return np.allclose(np.frombuffer(one, np.float32), np.frombuffer(other, np.float32), atol=1e-4)


def sent(agent: Agent) -> int:
    return ledger(agent.gate, [])[0]["parameters"]


def test_a_state_goes_in_and_an_update_comes_out_counted(agent: Agent) -> None:
    assert agent.ready == Ready((50,), (0,), 2)
    before = sent(agent)
    with agent.host() as host:
        update, values = agent.step(host)
        assert agent.fetch(host, 200) == values[:800]  # again
    assert (update.exchange, update.samples) == (1, 10)
    loss = pytest.approx(10 * np.log(8), rel=1e-4)  # of weights that are all 0
    assert (update.metrics, update.weight) == ({"loss": (loss, 10)}, 10)
    assert np.abs(np.frombuffer(values, np.float32)).max() == update.largest > 0
    assert sent(agent) - before == 4 * SIZE + 800
    assert isinstance(agent.error, ConnectionLost)


class Traced:
    """The places in memory that one socket of this process sends from and receives into."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sock: socket.socket | None = None
        self.into: list[tuple[int, int]] = []
        self.out: list[tuple[int, int]] = []
        sendall, recv_into = socket.socket.sendall, socket.socket.recv_into

        def sends(sock: socket.socket, data: Buffer) -> None:
            if sock is self.sock:
                self.out.append((address(data), memoryview(data).nbytes))
            sendall(sock, data)

        def receives(sock: socket.socket, buffer: memoryview) -> int:
            count = recv_into(sock, buffer)
            if sock is self.sock:
                self.into.append((address(buffer), count))
            return count

        patch.setattr(socket.socket, "sendall", sends)
        patch.setattr(socket.socket, "recv_into", receives)


def address(buffer: Buffer) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def within(places: list[tuple[int, int]], memory: memoryview) -> int:
    """Return how many bytes were sent from, or received into, ``memory``."""
    begin = address(memory)
    return sum(count for at, count in places if begin <= at <= at + count <= begin + len(memory))


@pytest.mark.parametrize("searched", [False, True])
def test_an_agent_copies_vectors_only_to_search_them(
    tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch, searched: bool
) -> None:
    """The kernel writes a state into the memory that the worker maps, and sends values from there. The worker
    copies the state once: there are at most two copies in user space per exchange, see test_gradients for
    those of the worker.
    """
    patterns = [Pattern("c", CANARY, True)] if searched else []
    with agent_in(tmp_path, zygote, *patterns, classes=4032) as agent:
        size = 65 * 4032  # two parts; one of 16 KiB would be copied to its head
        with agent.host() as host:
            trace = Traced(monkeypatch)
            trace.sock = agent.socket
            host.send(agent.work(), soon(), bytes(4 * size))
            host.expect(Update, soon())
            host.send(Fetch(size), soon())
            for start in range(0, size, PART_VALUES):
                part = host.expect(Part, soon(), payload=None)
                values = host.receive_payload(4 * PART_VALUES, soon())
                assert part.start == start and len(values) == 4 * min(PART_VALUES, size - start)
            monkeypatch.undo()
        state, sent_from = agent.worker._state.data, agent.worker._values.data
        assert within(trace.into, state) == 4 * size
        assert within(trace.out, sent_from) == (0 if searched else 4 * size)
        heads = sum(count for _, count in (*trace.into, *trace.out)) - 8 * size
        assert 0 < heads < 4096  # nothing was sent or received twice


def test_a_model_that_raises_tells_where_and_nothing_more(agent: Agent) -> None:
    before = sent(agent)
    with agent.host() as host:
        with pytest.raises(
            Refused, match=r"ValueError at net.py:\d+ in forward; its message stays"
        ) as caught:
            agent.step(host, RAISE)
        assert caught.value.code == "model"
        with pytest.raises(Refused, match="samples 49 to 59 are wanted; there are 50") as caught:
            host.send(agent.work(start=49), soon(), bytes(4 * SIZE))
            host.expect(Update, soon())
        assert caught.value.code == "data"
        assert sent(agent) == before
        agent.step(host)
    eventually(lambda: CANARY.decode() in agent.log.read_text(), "the output has been copied to the log")


def test_a_request_that_the_policy_forbids_is_refused_and_the_worker_lives_on(agent: Agent) -> None:
    with agent.host() as host:
        host.send(agent.work(count=1), soon(), bytes(4 * SIZE))
        with pytest.raises(Refused, match=r"policy\.least_samples: samples 0 to 1 of ") as caught:
            host.expect(Update, soon())
        assert caught.value.code == "policy"
        agent.step(host)


@pytest.mark.parametrize("stop", [-1, 0, SIZE + 1])
def test_values_that_there_are_not_end_the_connection(agent: Agent, stop: int) -> None:
    with agent.host() as host:
        agent.step(host)
        host.send(Fetch(stop), soon())
        with pytest.raises(ConnectionLost):
            host.receive(soon())
    assert f"wants {stop} values of an update" in str(agent.error)


def test_before_there_is_an_update_none_can_be_fetched(agent: Agent) -> None:
    with agent.host() as host:
        with pytest.raises(Refused):
            agent.step(host, RAISE)
        host.send(Fetch(SIZE), soon())
        with pytest.raises(ConnectionLost):
            host.receive(soon())


@pytest.mark.parametrize("size", [0, 4, -4])
def test_a_state_of_another_size_ends_the_connection_alone(agent: Agent, size: int) -> None:
    whole = 4 * SIZE
    with agent.host() as host, pytest.raises(ConnectionLost):  # by either: the other closes at the head
        host.send(agent.work(), soon(), bytes(size and whole + size))
        host.receive(soon())
    assert str(agent.error) == f"the host sent {size and whole + size} bytes of state, not {whole}"
    with agent.host() as host:
        agent.step(host)


def test_a_message_that_has_no_place_there_ends_the_connection(agent: Agent) -> None:
    with agent.host() as host:
        host.send(Ok(), soon())
        with pytest.raises(ConnectionLost):
            host.receive(soon())
    assert str(agent.error) == "'ok' has no place on a bulk connection"


def test_a_payload_behind_a_request_that_has_none_ends_the_connection(agent: Agent) -> None:
    with agent.host() as host:
        agent.step(host)
        host.send(Fetch(8), soon(), bytes(4))
        with pytest.raises(ConnectionLost):
            host.receive(soon())
    assert str(agent.error) == "'fetch' has no place on a bulk connection"


def test_samples_that_are_made_up_need_no_private_ones(agent: Agent) -> None:
    """Only their time and memory leave, so what the policy says of private samples is not asked."""
    with agent.host() as host:
        host.send(Work(0, GOOD, 0, (), synthetic=1), soon(), bytes(4 * SIZE))
        update = host.expect(Update, soon())
        assert (update.samples, update.metrics, update.norm) == (1, {"loss": (0.0, 1.0)}, 0.0)
        assert update.seconds > 0 and update.peak > 0
        host.send(Fetch(8), soon())
        with pytest.raises(ConnectionLost):
            host.receive(soon())
    assert "was not answered" in str(agent.error)


def test_forbidden_bytes_among_sums_do_not_leave(agent: Agent) -> None:
    before, seen = sent(agent), ledger(agent.gate, [])[1]["c"]
    with agent.host() as host, pytest.raises(ConnectionLost):
        agent.step(host, LEAK)
    assert isinstance(agent.error, CanaryError)
    assert sent(agent) == before
    assert ledger(agent.gate, [])[1]["c"] == seen + 1


def test_what_is_written_after_the_search_is_not_what_is_sent(agent: Agent) -> None:
    sums_there = agent.worker._values.data
    written: list[bool] = []

    def searched() -> None:
        """Now the worker writes to the sums, and is done before anything is sent."""
        sums_there[:4] = np.float32(MARK).tobytes()
        end = time.monotonic() + 20
        while CANARY not in bytes(sums_there) and time.monotonic() < end:
            time.sleep(0.001)
        written.append(CANARY in bytes(sums_there))

    agent.outlet.searched = searched
    with agent.host() as host:
        _, sums = agent.step(host, LEAK_LATER, count=50)
        agent.outlet.searched = lambda: None
        assert written == [True]
        assert CANARY not in sums
        assert alike(sums, agent.step(host, count=50)[1])


def test_where_nothing_is_searched_the_same_sums_leave_counted(
    agent: Agent, tmp_path: Path, zygote: Zygote
) -> None:
    with agent.host() as host:
        expected = agent.step(host, count=50)[1]
    with agent_in(tmp_path, zygote) as other, other.host() as host:
        assert agent.outlet.searches and not other.outlet.searches
        assert all(alike(other.step(host, count=50)[1], expected) for _ in range(2))
        assert ledger(other.gate, [])[0]["parameters"] == 2 * 4 * SIZE


@pytest.mark.expected_log("job steps: the worker process hangs")
def test_a_worker_that_hangs_is_told_and_a_host_that_leaves_is_not_waited_for(
    tmp_path: Path, zygote: Zygote
) -> None:
    with agent_in(tmp_path, zygote) as agent:
        with agent.host() as host:
            host.send(agent.work(HANG), soon(), bytes(4 * SIZE))
            time.sleep(0.2)
        assert isinstance(agent.error, HostLeft)
        with agent.host() as host:
            with pytest.raises(Refused, match="hangs: it neither computes nor reads") as caught:
                agent.step(host)
            assert caught.value.code == "worker"
        assert isinstance(agent.error, ConnectionLost)


def test_a_worker_that_dies_in_a_step_is_told(tmp_path: Path, zygote: Zygote) -> None:
    with agent_in(tmp_path, zygote) as agent, agent.host() as host:
        with pytest.raises(Refused, match="the worker process died") as caught:
            agent.step(host, DIE)
        assert caught.value.code == "worker"


@pytest.mark.parametrize("normalized", [False, True])
def test_the_number_of_local_steps_leaves_only_where_it_is_needed(
    tmp_path: Path, zygote: Zygote, normalized: bool
) -> None:
    local = LocalRule(normalized=normalized)
    with agent_in(tmp_path, zygote, local=local) as agent, agent.host() as host:
        update, _ = agent.step(host, CLAIM)
        assert update.local_steps == (7.0 if normalized else 1.0)


def test_what_a_model_says_itself_does_not_leave(tmp_path: Path, zygote: Zygote) -> None:
    with agent_in(tmp_path, zygote) as agent:
        with agent.host() as host, pytest.raises(ConnectionLost):
            agent.step(host, SPEAK)
        assert str(agent.error) == "the worker sent 'update', which may not leave"
        assert sent(agent) == 0


def test_a_task_keeps_no_more_than_the_policy_allows(agent: Agent) -> None:
    large = agent.kept / "large"
    with agent.host() as host:
        try:
            with large.open("wb") as file:
                file.truncate((1 << 30) + 1)  # a hole
            host.send(agent.work(), soon(), bytes(4 * SIZE))
            with pytest.raises(Refused) as refused:
                host.expect(Update, soon())
        finally:
            large.unlink()
        text = (
            f"policy.largest_state: the task keeps {(1 << 30) + 1} bytes"
            f" on the device; at most {1 << 30} are allowed"
        )
        assert (refused.value.code, refused.value.text) == ("policy", text)
        assert agent.step(host)[0].samples == 10


def test_the_folder_of_states_stays_while_another_worker_of_the_job_has_it(
    tmp_path: Path, zygote: Zygote
) -> None:
    """A new worker may come before the agent has ended the last one: its state would have no place."""
    agent = Agent(tmp_path, zygote)
    newer = agent.another()
    agent.worker.stop()
    assert agent.kept.is_dir()
    newer.stop()
    assert not agent.kept.exists()
    last = agent.another()
    (agent.kept / "state.safetensors").touch()
    last.stop()
    assert agent.kept.is_dir()
