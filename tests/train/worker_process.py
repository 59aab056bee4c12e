# SPDX-License-Identifier: Apache-2.0
"""Support of the tests of the roles: a real process of a worker or a parameter server, and its memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from millpond.aggregate.kernels import Vector
from millpond.base.deadline import Deadline
from millpond.base.errors import Refused
from millpond.linux import memory
from millpond.linux.confinement.sandbox import Sandbox
from millpond.linux.zygote.client import Child, Zygote
from millpond.train.balance.data_plan import order
from millpond.train.balance.ranges import Ranges
from millpond.train.job.files import JobFile
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.protocol import (
    Apply,
    Folder,
    GetMomentum,
    Momentum,
    PrepareServer,
    PrepareWorker,
    Ready,
    ServerReady,
    StepApplied,
)
from millpond.train.state import flat, layout
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.state.layout import Tensor
from millpond.train.worker import user_code
from millpond.wire.channel import Channel
from millpond.wire.messages import Message, Ok

from ..job_files import written

NETS = """
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, fail=""):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
        if fail == "more":
            self.square = nn.Parameter(torch.eye(8) + torch.ones(8, 8).triu())
        self.fail = fail

    def forward(self, images):
        if torch.initial_seed() == 13:
            os.ftruncate(vectors("values"), 0)
        if torch.initial_seed() == 14:
            raise ValueError("patient-4711")
        if self.fail == "scores" and not self.training:
            self.layers[1].bias.data.add_(1)
        self.change(torch.initial_seed(), self.layers[1].weight)
        return self.layers(images)

    def change(self, how, weight):
        if how == 15:
            weight.data = torch.renorm(weight.data, 2, 0, 0.1)
        if how == 16:
            weight.data.clamp_(-0.01, 0.01)
        if how == 17:
            with torch.no_grad():
                self.layers[1].bias.add_(1)
        if how == 18:
            self.layers[1].bias = nn.Parameter(self.layers[1].bias.detach().clone())
        if how == 19:
            self.square.data = self.square.data.t()
        if how == 20:
            before = weight.data.clone()
            weight.data.mul_(2)
            weight.data.copy_(before)
        if how == 21:
            os.pwrite(vectors("states"), bytes(4), 0)

def vectors(what):
    links = {name: "/proc/self/fd/" + name for name in os.listdir("/proc/self/fd")}
    return next(int(n) for n, link in links.items() if os.path.lexists(link) and what in os.readlink(link))

def frozen(value=0.5):
    net = Net()
    net.own = nn.Parameter(torch.full((3,), value), requires_grad=False)
    net.layers[1].bias.requires_grad_(False)
    return net

def two(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8))
def double(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8)).double()
def brief(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8).bfloat16())
def half(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8)).half()

class Task:
    def __init__(self, loss): self.loss = loss
    def model(self): return Net()

def total(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
def infinite(): return Task(lambda model, batch: (total(model, batch) * torch.inf, 2))
def nothing(): return Task(lambda model, batch: (total(model, batch) * 0 + 1, 0))
def constant(): return Task(lambda model, batch: (torch.ones(()), 2))
def wrong(): return Task(lambda model, batch: total(model, batch))

class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 8).bfloat16()
        self.scale = nn.Parameter(torch.ones(8))
    def forward(self, images):
        return self.linear(images.flatten(1).bfloat16()).float() * self.scale
"""
OPTIMIZER = OptimizerSpec("sgd", 0.5, {"momentum": 0.9})
WORK = WorkSpec("steps", ModelSpec("nets:Net", ("nets.py",)), optimizer=OPTIMIZER)
FOLDERS = (Folder("private/digits", "csd1"), Folder("public/digits", "csd1", public=True))
COUNTS = (30, 20)
SHRINKS, RAISES, REPLACES, CLAMPS, ADDS, RENEWS, TURNS, RESTORES, WRITES = range(
    13, 22
)  # what the model does when a step's seed says so


class Process:
    """A worker process, the coordinator's end of its channel, and the memory of both."""

    def __init__(
        self,
        zygote: Zygote | None,
        root: Path,
        log: Path,
        state: Path | None = None,
        *options: str,
        code: str = NETS,
    ) -> None:
        """Start a fork of the zygote; without one, a process of its own."""
        ours, theirs = socket.socketpair()
        self.shared = [memory.make(f"{what} of the tests") for what in ("states", "values")]
        self.log, self.code_dir = log, written({"nets.py": code}, log.parent / f"{log.name}.code")
        more = ["--root", str(root), "--code", str(self.code_dir), *options]
        more += ["--state", str(state)] if state else []
        self.process: Child | subprocess.Popen[bytes]
        with theirs, log.open("wb") as output:
            passed = [theirs.fileno(), *self.shared]
            if zygote:
                arguments = ["3", "--shared", "4", "5", *more]
                self.process = zygote.start(Sandbox(), arguments, passed, output.fileno())
            else:
                first, *others = map(str, passed)
                argv = [sys.executable, "-m", "millpond.train.worker.process", first, "--shared", *others]
                self.process = subprocess.Popen([*argv, *more], pass_fds=passed, stdout=output, stderr=output)
        self.channel = Channel(ours, "worker")
        self.state = self.values = np.empty(0, np.float32)

    def prepare(
        self,
        work: WorkSpec = WORK,
        folders: tuple[Folder, ...] = FOLDERS,
        frozen: int = 0,
        run: str = "",
        first: JobFile | None = None,
    ) -> Ready:
        model = user_code.build(work, self.code_dir)[1]
        local = flat.local_names(model, work.local_layers)
        tensors = flat.describe(model, local)
        user_code.forget(self.code_dir)
        size = 4 * layout.size(tensors)
        self.state, self.values = (
            np.frombuffer(memory.map_first(shared, size).data, np.float32) for shared in self.shared
        )
        frozen = frozen or flat.checksum(model, local)
        request = PrepareWorker(work, "csd1", folders, {}, tensors, frozen, run=run, first=first)
        ready = self.call(request, Ready)
        assert isinstance(ready, Ready)
        return ready

    def prepare_server(self, work: WorkSpec = WORK, test: str = "") -> tuple[Tensor, ...]:
        ready = self.call(PrepareServer(work, test=test), ServerReady)
        assert isinstance(ready, ServerReady)
        size = 4 * layout.size(ready.tensors)
        self.state, self.values = (
            np.frombuffer(memory.map_second(shared, size).data, np.float32) for shared in self.shared
        )
        return ready.tensors

    def call(self, request: Message, reply: type[Message], payload: bytes = b"") -> Message:
        return self.channel.call(request, reply, soon(), payload)

    def apply(self, mean: Vector, factor: float = 1.0) -> Vector:
        self.values[:] = mean
        self.call(Apply(factor), StepApplied)
        return self.state.copy()

    def momentum(self) -> tuple[tuple[Tensor, ...], bytes]:
        self.channel.send(GetMomentum(), soon())
        momentum = self.channel.expect(Momentum, soon(), payload=None)
        return momentum.tensors, bytes(self.channel.receive_payload(4 * momentum.size, soon()))

    def refused(self, request: Message, payload: bytes = b"") -> tuple[str, str]:
        with pytest.raises(Refused) as caught:
            self.call(request, Ok, payload)
        return caught.value.code, caught.value.text


def soon() -> Deadline:
    return Deadline.after(60)


@contextmanager
def started(
    zygote: Zygote | None, root: Path, log: Path, state: Path | None = None, *options: str, code: str = NETS
) -> Iterator[Process]:
    process = Process(zygote, root, log, state, *options, code=code)
    try:
        with process.channel:
            yield process
        process.process.wait(30)
    finally:
        process.process.kill()
        process.process.wait()
        for descriptor in process.shared:
            os.close(descriptor)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume with samples that are easy to learn: one bright row per class."""
    root = tmp_path_factory.mktemp("volume")
    rng = np.random.default_rng(0)
    for folder, count in (("private/digits", 30), ("public/digits", 20), ("held-out", 40)):
        labels = rng.integers(0, 8, count)
        images = rng.integers(0, 60, (count, 8, 8)).astype(np.uint8)
        images[np.arange(count), labels] = 255
        (root / folder).mkdir(parents=True)
        np.save(root / folder / "images.npy", images)
        np.save(root / folder / "labels.npy", labels)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def module_worker(root: Path, folder: Path, zygote: Zygote) -> Iterator[Process]:
    with started(zygote, root, folder / "steps.log") as process:
        yield process
    assert process.process.returncode == 0


@pytest.fixture
def worker(module_worker: Process) -> Process:
    """One that computes steps, and lives on through its failures."""
    module_worker.prepare()
    return module_worker


@pytest.fixture(scope="module")
def module_server(root: Path, folder: Path, zygote: Zygote) -> Iterator[Process]:
    with started(zygote, root, folder / "server.log") as process:
        yield process
    assert process.process.returncode == 0


@pytest.fixture
def server(module_server: Process) -> Process:
    """One that keeps the model, as it is in the beginning."""
    module_server.prepare_server()
    return module_server


def state_of(seed: int, size: int) -> Vector:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32) / 10


def gradient_sums(root: Path, state: Vector, epoch: int, ranges: tuple[Ranges, ...]) -> tuple[Vector, float]:
    """Return what one process computes from the files."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    FlatParameters(model).load(state)
    images, labels = [], []
    for folder, count, own in zip(FOLDERS, COUNTS, ranges, strict=True):
        found = order(count, WORK.seed, epoch, folder.source, folder.public)
        indices = np.concatenate([found[:0], *(found[start:stop] for start, stop in own)])
        images.append(np.load(root / folder.path / "images.npy")[indices])
        labels.append(np.load(root / folder.path / "labels.npy")[indices])
    pixels = torch.from_numpy(np.concatenate(images)).float() / 255
    loss = cross_entropy(model(pixels), torch.from_numpy(np.concatenate(labels)), reduction="sum")
    loss.backward()
    return torch.cat(
        [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
    ).numpy(), loss.item()


def of(factory: str) -> WorkSpec:
    return replace(WORK, model=ModelSpec(f"nets:{factory}", ("nets.py",)))
