# SPDX-License-Identifier: Apache-2.0
"""The agent's relay of steps to a real worker process, whose model misbehaves as the step's seed says."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.gate import CanaryError, Gate, LedgerCounters, Pattern, ledger
from millpond.agent.job_worker import HostLeft, JobWorker
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, Refused
from millpond.linux.zygote.client import Zygote
from millpond.train.job.spec import DataSpec, Job, ModelSpec, SynchronousSpec
from millpond.train.protocol import Compute, Computed, PrepareWorker, Ready
from millpond.wire.channel import Buffer, Channel
from millpond.wire.messages import Kind, Ok

from ..waiting import eventually

CANARY = b"canary-of-the-test-1"  # as long as five floats
GOOD, RAISE, DIE, HANG, LEAK, LEAK_LATER, SPEAK = range(7)
MARK = 4711.0

MODEL = f'''
import os
import threading
import time

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
        self.hooks = []

    def forward(self, images):
        mode, weight = torch.initial_seed(), self.layers[1].weight
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
        if mode == {SPEAK}:
            speak()
        return self.layers(images)


def leak(gradient):
    gradient.view(-1)[:5] = torch.from_numpy(np.frombuffer({CANARY!r}, np.float32).copy())
    return gradient


def leak_later(weight):
    while weight.grad is None or weight.grad.view(-1)[0] != {MARK}:
        time.sleep(0.001)
    leak(weight.grad)


def speak():
    from millpond.train.protocol import Computed
    from millpond.wire.framing import encode
    told = encode(Computed(1, 2, 0.0, 0.0, 0.0, 0), 8) + bytes(8)
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


SEALING = """
import fcntl
import os
from torch import nn

def Net():
    links = {{name: "/proc/self/fd/" + name for name in os.listdir("/proc/self/fd")}}
    shared = next(int(n) for n, l in links.items() if os.path.lexists(l) and "{0} of" in os.readlink(l))
    seals = fcntl.F_SEAL_SEAL | (fcntl.F_SEAL_GROW if "{0}" == "state" else 0)
    fcntl.fcntl(shared, fcntl.F_ADD_SEALS, seals)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
"""


class Agent:
    """A worker of a device, and hosts that connect to it one after the other."""

    def __init__(self, base: Path, zygote: Zygote, *patterns: Pattern, model: str = MODEL) -> None:
        folder = base / "volume" / "private"
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
        )
        self.log = base / "state" / "jobs" / "steps.log"
        self.log.parent.mkdir(parents=True)
        self.outlet = Watched(self.gate)
        self.worker = JobWorker(config, "steps", zygote)
        job = Job(
            "steps",
            DataSpec("private", "test"),
            ModelSpec("net:Net", ("net.py",)),
            synchronous=SynchronousSpec(),
        )
        request = PrepareWorker(job, "csd0", ("private",), {"net.py": model}, role="steps")
        near, far = socket.socketpair()
        with Channel(near, "csd0"), Channel(far, "host") as control, ExitStack() as failed:
            failed.callback(self.worker.stop)
            self.ready: Ready = self.worker.prepare(request, control)
            failed.pop_all()
        self.error: Exception | None = None

    @contextmanager
    def host(self) -> Iterator[Channel]:
        """The host's end of a bulk connection, relayed until the end of the block; then see ``error``."""
        near, far = socket.socketpair()
        self.error = None

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

    def step(self, host: Channel, mode: int = GOOD) -> tuple[Computed, bytes]:
        host.send(Compute(1, mode, ((3, 4),)), soon(), bytes(4 * self.ready.size))
        computed = host.expect(Computed, soon(), payload=4 * self.ready.size)
        return computed, bytes(host.receive_payload(4 * self.ready.size, soon()))


def soon() -> Deadline:
    return Deadline.after(30)


@contextmanager
def agent_in(folder: Path, zygote: Zygote, *patterns: Pattern) -> Iterator[Agent]:
    before = psutil.Process().children(recursive=True)
    made = Agent(folder, zygote, *patterns)
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


def sent(agent: Agent) -> int:
    return ledger(agent.gate, [])[0]["parameters"]


def test_state_goes_in_and_sums_come_out_counted(agent: Agent) -> None:
    before = sent(agent)
    with agent.host() as host:
        computed, sums = agent.step(host)
        again = agent.step(host)[1]
    assert (computed.step, computed.samples) == (1, 2)
    assert computed.loss == pytest.approx(2 * np.log(8), rel=1e-4)  # of weights that are all 0
    assert np.frombuffer(sums, np.float32).any() and sums == again
    assert sent(agent) - before == 2 * 4 * agent.ready.size
    assert isinstance(agent.error, ConnectionLost)


def test_a_model_that_raises_tells_where_and_nothing_more(agent: Agent) -> None:
    before = sent(agent)
    with agent.host() as host:
        with pytest.raises(
            Refused, match=r"ValueError at net.py:\d+ in forward; its message stays"
        ) as caught:
            agent.step(host, RAISE)
        assert caught.value.code == "model"
        with pytest.raises(Refused, match="sample 50 is wanted; there are 50") as caught:
            host.send(Compute(1, 0, ((50,),)), soon(), bytes(4 * agent.ready.size))
            host.expect(Computed, soon(), payload=4 * agent.ready.size)
        assert caught.value.code == "data"
        assert sent(agent) == before
        agent.step(host)
    eventually(lambda: CANARY.decode() in agent.log.read_text(), "the output has been copied to the log")


@pytest.mark.parametrize("size", [0, 4, -4])
def test_a_state_of_another_size_ends_the_connection_alone(agent: Agent, size: int) -> None:
    whole = 4 * agent.ready.size
    with agent.host() as host, pytest.raises(ConnectionLost):  # by either: the other closes at the head
        host.send(Compute(1, GOOD, ((3,),)), soon(), bytes(size and whole + size))
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


def test_forbidden_bytes_among_sums_do_not_leave(agent: Agent) -> None:
    before, seen = sent(agent), ledger(agent.gate, [])[1]["c"]
    with agent.host() as host, pytest.raises(ConnectionLost):
        agent.step(host, LEAK)
    assert isinstance(agent.error, CanaryError)
    assert sent(agent) == before
    assert ledger(agent.gate, [])[1]["c"] == seen + 1


@pytest.mark.parametrize("what", ["state", "sums"])
def test_memory_that_the_model_has_sealed_is_not_used(tmp_path: Path, zygote: Zygote, what: str) -> None:
    with pytest.raises(ProtocolError, match=r"steps: .*(Operation not permitted|kept from)"):
        Agent(tmp_path, zygote, model=SEALING.format(what))


def test_what_is_written_after_the_search_is_not_what_is_sent(agent: Agent) -> None:
    shared = agent.worker._sums
    assert shared is not None
    sums_there = shared.data
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
        _, sums = agent.step(host, LEAK_LATER)
        agent.outlet.searched = lambda: None
        assert written == [True]
        assert CANARY not in sums
        assert sums == agent.step(host)[1]


def test_where_nothing_is_searched_the_same_sums_leave_counted(
    agent: Agent, tmp_path: Path, zygote: Zygote
) -> None:
    with agent.host() as host:
        expected = agent.step(host)[1]
    with agent_in(tmp_path, zygote) as other, other.host() as host:
        assert agent.outlet.searches and not other.outlet.searches
        assert [other.step(host)[1] for _ in range(2)] == [expected, expected]
        assert ledger(other.gate, [])[0]["parameters"] == 2 * 4 * other.ready.size


@pytest.mark.expected_log("job steps: the worker process hangs")
def test_a_worker_that_hangs_is_told_and_a_host_that_leaves_is_not_waited_for(
    tmp_path: Path, zygote: Zygote
) -> None:
    with agent_in(tmp_path, zygote) as agent:
        with agent.host() as host:
            host.send(Compute(1, HANG, ((3,),)), soon(), bytes(4 * agent.ready.size))
            time.sleep(0.2)
        assert isinstance(agent.error, HostLeft)
        with agent.host() as host:
            with pytest.raises(Refused, match="hangs: it has not used its processor") as caught:
                agent.step(host)
            assert caught.value.code == "worker"
        assert isinstance(agent.error, ConnectionLost)


def test_a_worker_that_dies_in_a_step_is_told(tmp_path: Path, zygote: Zygote) -> None:
    with agent_in(tmp_path, zygote) as agent, agent.host() as host:
        with pytest.raises(Refused, match="the worker process died") as caught:
            agent.step(host, DIE)
        assert caught.value.code == "worker"


def test_what_a_model_says_itself_does_not_leave(tmp_path: Path, zygote: Zygote) -> None:
    with agent_in(tmp_path, zygote) as agent:
        with agent.host() as host, pytest.raises(ConnectionLost):
            agent.step(host, SPEAK)
        assert str(agent.error) == "the worker sent 'computed', which may not leave"
        assert sent(agent) == 0
