# SPDX-License-Identifier: Apache-2.0
"""A real worker process behind the agent's JobWorker, whose model misbehaves as a request's seed says."""

from __future__ import annotations

import socket
import threading
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
from millpond.agent.job_worker import JobWorker
from millpond.agent.policy.budget_ledger import BudgetLedger
from millpond.agent.policy.draws import SecretDraws
from millpond.agent.policy.rules import StateAnswers
from millpond.agent.policy.settings import Policy
from millpond.aggregate.encoding.layout import Encoding
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, ProtocolError
from millpond.linux.zygote.client import Zygote
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import (
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
from millpond.wire.messages import Kind

from ..audited import unlogged
from ..job_files import written

CANARY = b"canary-of-the-test-1"  # as long as five floats
GOOD, RAISE, DIE, HANG, LEAK, LEAK_LATER, SPEAK, CLAIM, TELL = range(9)
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
        if mode == {TELL}:
            tell(50, 40, 60, 60, 200)
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
    write(encode(update, len(payload)) + payload)
    time.sleep(600)


def tell(*percents):
    from millpond.train.protocol import WorkProgress
    from millpond.wire.framing import encode
    write(b"".join(encode(WorkProgress(percent)) for percent in percents))


def write(told):
    (own,) = (n for n in os.listdir("/proc/self/fd") if is_socket("/proc/self/fd/" + n))
    os.write(int(own), told)


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
            flash=str(base / "volume"),
            volume=str(base / "volume"),
            state=str(base / "state"),
            policy=Policy(least_samples=2, answers_per_state=0),
        )
        self.log = config.job_logs / "steps.log"
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
            config,
            request,
            files,
            zygote,
            StateAnswers(0),
            BudgetLedger(base / "budget"),
            SecretDraws(base / "draws.key"),
            self.gate,
            unlogged(),
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
