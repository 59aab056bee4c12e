# SPDX-License-Identifier: Apache-2.0
"""Gradients and the parameter server, over real processes and the memory that they share."""

from __future__ import annotations

import os
import socket
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
from millpond.linux.zygote.client import Zygote
from millpond.train.balance.data_plan import order
from millpond.train.balance.ranges import Ranges
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.protocol import (
    Apply,
    Evaluate,
    Folder,
    Frozen,
    GetFrozen,
    GetMomentum,
    Momentum,
    PrepareServer,
    PrepareWorker,
    Ready,
    Restore,
    Score,
    ServerReady,
    StepApplied,
    Update,
    Work,
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
WORK = WorkSpec("steps", ModelSpec("nets:Net", ("nets.py",)))
OPTIMIZER = OptimizerSpec("sgd", 0.5, {"momentum": 0.9})
FOLDERS = (Folder("private/digits", "csd1"), Folder("public/digits", "csd1", public=True))
COUNTS = (30, 20)
SHRINKS, RAISES, REPLACES, CLAMPS, ADDS, RENEWS, TURNS, RESTORES, WRITES = range(
    13, 22
)  # what the model does when a step's seed says so


class Process:
    """A worker process, the coordinator's end of its channel, and the memory of both."""

    def __init__(self, zygote: Zygote, root: Path, log: Path) -> None:
        ours, theirs = socket.socketpair()
        self.shared = [memory.make(f"{what} of the tests") for what in ("states", "values")]
        self._code_dir = written({"nets.py": NETS}, log.parent / f"{log.name}.code")
        options = ["3", "--root", str(root), "--shared", "4", "5", "--code", str(self._code_dir)]
        with theirs, log.open("wb") as output:
            passed = [theirs.fileno(), *self.shared]
            self.process = zygote.start(Sandbox(), options, passed, output.fileno())
        self.channel = Channel(ours, "worker")
        self.state = self.values = np.empty(0, np.float32)

    def prepare(self, work: WorkSpec = WORK, folders: tuple[Folder, ...] = FOLDERS, frozen: int = 0) -> Ready:
        tensors = flat.describe(user_code.build(work, self._code_dir)[1])
        user_code.forget(self._code_dir)
        size = 4 * layout.size(tensors)
        self.state, self.values = (
            np.frombuffer(memory.map_first(shared, size).data, np.float32) for shared in self.shared
        )
        request = PrepareWorker(work, "csd1", folders, {}, tensors, frozen)
        ready = self.call(request, Ready)
        assert isinstance(ready, Ready)
        return ready

    def prepare_server(self, work: WorkSpec = WORK, test: str = "") -> tuple[Tensor, ...]:
        ready = self.call(PrepareServer(work, OPTIMIZER, test=test), ServerReady)
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
def started(zygote: Zygote, root: Path, log: Path) -> Iterator[Process]:
    process = Process(zygote, root, log)
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


def test_a_worker_counts_its_samples_by_folder(worker: Process) -> None:
    assert worker.prepare() == Ready((30, 20), (0, 0))
    assert worker.prepare(folders=FOLDERS[:1]) == Ready((30,), (0,))


def test_sums_over_the_samples_of_both_folders(worker: Process, root: Path) -> None:
    asked = [
        (1, (((0, 3), (9, 10)), ((19, 20),))),
        (1, (((5, 6),), ((5, 6),))),
        (2, ((), ((1, 3),))),
        (3, (((7, 9),), ())),
    ]
    for number, (epoch, ranges) in enumerate(asked):
        state = worker.state[:] = state_of(number, 520)
        request = Work(number, 5, epoch, ranges)
        update = worker.call(request, Update)
        assert isinstance(update, Update)
        sums, loss = gradient_sums(root, state, epoch, ranges)
        assert (update.exchange, update.samples) == (number, request.samples)
        assert update.metrics == {"loss": (pytest.approx(loss, rel=1e-5), request.samples)}
        assert update.weight == request.samples
        assert np.allclose(worker.values, sums, rtol=1e-4, atol=1e-5) and sums.any()
        assert update.largest == np.abs(worker.values).max()
        assert update.norm == pytest.approx(np.linalg.norm(worker.values), rel=1e-5)
        assert np.array_equal(worker.state, state)
        assert update.seconds > 0 and 0 <= update.busy <= 1 and update.peak > 1 << 20


def test_an_exchange_that_cannot_be_is_said_and_the_worker_lives_on(worker: Process) -> None:
    asked = {
        (((29, 31),), ()): "samples 29 to 31 are wanted; there are 30",
        (((3, 3),), ()): "samples 3 to 3 are wanted; there are 30",
        ((), ()): "an exchange without samples is wanted",
        (((1, 2),),): "samples of 1 folders are wanted; there are 2",
    }
    for ranges, text in asked.items():
        assert worker.refused(Work(1, 5, 1, ranges)) == ("data", text)
    code, text = worker.refused(Work(1, RAISES, 1, (((1, 2),), ())))
    assert code == "model" and text.startswith("ValueError at nets.py:18 in forward; its message stays")
    worker.call(Work(1, 5, 1, (((1, 2),), ((2, 3),))), Update)


def test_synthetic_samples_are_the_same_whatever_the_real_ones(worker: Process, root: Path) -> None:
    worker.state[:] = state_of(3, 520)
    worker.call(Work(1, 5, 1, (), synthetic=12), Update)
    first = worker.values.copy()
    worker.prepare(folders=(Folder("public/digits", "csd1"),))
    worker.state[:] = state_of(3, 520)
    update = worker.call(Work(1, 5, 1, (), synthetic=12), Update)
    assert isinstance(update, Update) and update.samples == 12
    assert first.any() and np.array_equal(worker.values, first)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (REPLACES, "layers.1.weight"),
        (CLAMPS, "layers.1.weight"),
        (ADDS, "layers.1.bias"),
    ],
)
def test_a_model_that_changes_its_own_parameters_is_refused(
    root: Path, tmp_path: Path, zygote: Zygote, how: int, name: str
) -> None:
    """Others would not know: there would be as many models as workers."""
    with started(zygote, root, tmp_path / "log") as worker:
        worker.prepare()
        worker.state[:] = state_of(how, 520)
        request = Work(1, how, 1, (((1, 3),), ((3, 4),)))
        told = f"the model's forward changes its parameter '{name}'; only the optimizer may"
        assert worker.refused(request) == ("model", told)
        assert np.array_equal(worker.state, state_of(how, 520))
        worker.call(replace(request, seed=RESTORES), Update)  # what is as it was again does not matter


@pytest.mark.parametrize(("how", "name"), [(RENEWS, "layers.1.bias"), (TURNS, "square")])
def test_a_parameter_that_is_another_is_seen(
    root: Path, tmp_path: Path, zygote: Zygote, how: int, name: str
) -> None:
    more = replace(WORK, model=ModelSpec("nets:Net", ("nets.py",), arguments={"fail": "more"}))
    with started(zygote, root, tmp_path / "log") as process:
        process.prepare(more)
        process.state[:] = state_of(1, len(process.state))
        told = f"the model's forward changes its parameter '{name}'; only the optimizer may"
        assert process.refused(Work(1, how, 1, (((1, 3),), ()))) == ("model", told)


def test_frozen_parameters_stay_where_they_are(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    """The host has them for the model that it saves, and each worker builds the same."""
    with started(zygote, root, tmp_path / "a") as server, started(zygote, root, tmp_path / "b") as worker:
        found = server.call(PrepareServer(of("frozen"), OPTIMIZER), ServerReady)
        assert isinstance(found, ServerReady) and found.checksum
        assert [(tensor.name, tensor.shape) for tensor in found.tensors] == [("layers.1.weight", (8, 64))]
        assert [tensor.name for tensor in found.frozen] == ["own", "layers.1.bias"]
        server.channel.send(GetFrozen(), soon())
        frozen = server.channel.expect(Frozen, soon(), payload=4 * 11)
        values = np.frombuffer(server.channel.receive_payload(4 * 11, soon()), np.float32)
        assert (frozen.tensors, frozen.size) == (found.frozen, 11)
        assert (values[:3] == 0.5).all() and values[3:].any()

        worker.prepare(of("frozen"), frozen=found.checksum)
        worker.state[:] = state_of(1, 512)
        update = worker.call(Work(1, 5, 1, (((0, 3),), ())), Update)
        assert isinstance(update, Update) and len(worker.values) == 512 and worker.values.any()
        other = replace(WORK, model=ModelSpec("nets:frozen", ("nets.py",), arguments={"value": 0.25}))
        with pytest.raises(Refused, match="csd1 builds other frozen parameters than the host"):
            worker.prepare(other, frozen=found.checksum)


def test_samples_that_are_held_out_are_scored_and_never_trained_on(
    root: Path, tmp_path: Path, zygote: Zygote
) -> None:
    with started(zygote, root, tmp_path / "log") as worker:
        assert worker.prepare(replace(WORK, held_out=0.2)) == Ready((24, 20), (6, 0))
        state = worker.state[:] = state_of(1, 520)
        update = worker.call(Work(1, 5, 1, (), held_out=True), Update)
        assert isinstance(update, Update) and (update.samples, update.weight, update.largest) == (6, 0, 0)
        assert {name: count for name, (_, count) in update.metrics.items()} == {"accuracy": 6, "loss": 6}
        whole = worker.call(Work(2, 5, 1, (((0, 24),), ())), Update)
        assert isinstance(whole, Update)
        every, loss = gradient_sums(root, state, 1, (((0, 30),), ()))
        assert whole.metrics["loss"][0] + update.metrics["loss"][0] == pytest.approx(loss, rel=1e-5)
        assert not np.allclose(worker.values, every, rtol=1e-2)


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("infinite", "the task's loss is inf over a count of 2"),
        ("nothing", "the task's loss is 1 over a count of 0"),
        ("constant", "the task's loss does not depend on a parameter that may be trained"),
        ("wrong", "the task's loss must return a sum, a tensor of one value, and its count"),
    ],
)
def test_a_task_that_cannot_work_is_told_before_any_worker_is_asked(
    server: Process, factory: str, told: str
) -> None:
    work = replace(WORK, model=ModelSpec(f"nets:{factory}", ("nets.py",)), task=True)
    request = PrepareServer(work, OPTIMIZER, test="held-out")
    assert server.refused(request) == ("model", told)


def test_a_model_that_was_tried_is_as_it_was(server: Process) -> None:
    before = server.state.copy()
    server.prepare_server(test="held-out")
    assert np.array_equal(server.state, before)
    assert np.allclose(server.apply(state_of(1, 520)), before - 0.5 * state_of(1, 520), atol=1e-6)


def test_a_model_that_changes_while_it_is_scored_is_refused(
    root: Path, tmp_path: Path, zygote: Zygote
) -> None:
    scoring = replace(WORK, model=ModelSpec("nets:Net", ("nets.py",), arguments={"fail": "scores"}))
    with started(zygote, root, tmp_path / "log") as process:
        process.prepare_server(scoring)
        told = ("model", "the model changes a parameter while it is scored")
        assert process.refused(Evaluate("held-out")) == told


def test_a_worker_cannot_take_the_memory_away(worker: Process) -> None:
    worker.state[:] = 0.25
    code, text = worker.refused(Work(1, SHRINKS, 1, (((1, 2),), ())))
    assert code == "model" and text.startswith("PermissionError at nets.py:16 in forward")
    assert (worker.state == 0.25).all()
    assert os.fstat(worker.shared[1]).st_size == 4 * 520


def test_a_worker_reads_a_state_that_it_cannot_write_to(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    with started(zygote, root, tmp_path / "log") as worker:
        worker.prepare()
        memory.freeze(worker.shared[0])  # as the owner of the states does
        for number in range(2):
            state = worker.state[:] = state_of(number, 520)
            ranges: tuple[Ranges, ...] = (((1, 3),), ())
            worker.call(Work(number, 5, 1, ranges), Update)
            assert np.allclose(worker.values, gradient_sums(root, state, 1, ranges)[0], rtol=1e-4, atol=1e-5)
        code, text = worker.refused(Work(2, WRITES, 1, ranges))
        assert code == "model" and text.startswith("PermissionError at nets.py:")
        assert np.array_equal(worker.state, state)


def test_a_state_that_there_is_not_is_refused(worker: Process, server: Process) -> None:
    for number in (1, -1):
        told = ("model", f"there are 1 states, and none with number {number}")
        assert worker.refused(Work(1, 5, 1, (((1, 2),), ()), state=number)) == told
        assert server.refused(Apply(1.0, state=number)) == told


def test_a_model_of_float64_is_refused_and_one_of_float16_learns(
    root: Path, tmp_path: Path, zygote: Zygote
) -> None:
    with started(zygote, root, tmp_path / "a") as worker:
        request = PrepareWorker(of("double"), "csd1", FOLDERS, {}, ())
        code, found = worker.refused(request)
        assert code == "model" and found.startswith("the model's tensor '1.weight' is float64")
    with started(zygote, root, tmp_path / "b") as server:
        tensors = server.prepare_server(of("half"))
        assert {tensor.dtype for tensor in tensors} == {"float16"}
        before = server.state.copy()
        assert np.allclose(server.apply(np.full(520, 1e-6, np.float32)), before - 5e-7, atol=1e-9)


def test_autocast_is_there_wherever_a_model_computes(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    """This one takes no float32 itself."""
    work = replace(of("brief"), precision="bfloat16")
    with started(zygote, root, tmp_path / "a") as worker, started(zygote, root, tmp_path / "b") as server:
        worker.prepare(work)
        worker.call(Work(1, 5, 1, (((0, 3),), ())), Update)
        assert worker.values.any()
        server.prepare_server(work, test="held-out")
        score = server.call(Evaluate("held-out"), Score)
        assert isinstance(score, Score) and score.host["loss"] > 0


def of(factory: str) -> WorkSpec:
    return replace(WORK, model=ModelSpec(f"nets:{factory}", ("nets.py",)))


def test_a_worker_of_one_role_does_nothing_of_another(worker: Process, server: Process) -> None:
    for request in (Apply(1.0), GetMomentum(), GetFrozen(), Evaluate("held-out")):
        assert worker.refused(request) == ("protocol", f"this worker does not serve '{request.NAME}'")
    other = Work(1, 5, 1, (((1, 2),), ()))
    assert server.refused(other) == ("protocol", "this worker does not serve 'work'")


def test_the_first_state_is_that_of_the_seed(server: Process, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    expected = np.empty(520, np.float32)
    flat.read(user_code.build(WORK, tmp_path)[1], expected)
    user_code.forget(tmp_path)
    assert np.array_equal(server.state, expected) and expected.any()


def test_a_keeper_applies_means_at_a_part_of_its_rate(server: Process) -> None:
    before, mean = server.state.copy(), state_of(1, 520)
    first = server.apply(mean)
    assert np.allclose(first, before - 0.5 * mean, atol=1e-6)
    second = server.apply(mean, 0.25)
    assert np.allclose(second, first - 0.125 * (0.9 * mean + mean), atol=1e-6)


def test_a_keeper_goes_on_from_what_another_kept(server: Process) -> None:
    for step in range(3):
        state = server.apply(state_of(step, 520))
    tensors, values = server.momentum()
    expected = [server.apply(state_of(step, 520)).tobytes() for step in (7, 8)]
    assert [tensor.name for tensor in tensors] == ["0.momentum_buffer", "1.momentum_buffer"]
    assert len(values) == 4 * 520

    server.prepare_server()
    assert server.momentum() == ((), b"")
    server.state[:] = state
    server.call(Restore(tensors), Ok, values)
    assert [server.apply(state_of(step, 520)).tobytes() for step in (7, 8)] == expected


def test_before_its_first_step_a_keeper_is_restored_from_nothing(server: Process) -> None:
    server.state[:] = 0.5
    server.call(Restore(()), Ok)
    assert np.allclose(server.apply(np.ones(520, np.float32)), 0.0)


def test_what_is_not_of_an_optimizer_is_refused(server: Process) -> None:
    tensors = (Tensor("layers.weight", (3,), "float32"),)
    assert server.refused(Restore(tensors), bytes(12)) == (
        "model",
        "the checkpoint's 'layers.weight' is not of an optimizer",
    )


def test_a_keeper_scores_the_state_in_memory(server: Process) -> None:
    scores = []
    for weight in (0.0, 1.0):
        model = nn.Linear(64, 8)
        nn.init.zeros_(model.bias)
        rows = torch.zeros(8, 8, 8)
        rows[range(8), range(8)] = weight  # each class by its bright row
        model.weight.data = rows.view(8, 64)
        flat.read(model, server.state)
        score = server.call(Evaluate("held-out"), Score)
        assert isinstance(score, Score) and not score.devices
        scores.append(score.host)
    assert scores[1]["accuracy"] > 0.9 > scores[0]["accuracy"]
    assert scores[1]["loss"] < scores[0]["loss"] == pytest.approx(np.log(8), rel=1e-4)


def test_a_keeper_summarizes_the_sums_of_devices(server: Process) -> None:
    sums = {"accuracy": (3.0, 4.0), "loss": (5.0, 10.0), "odd": (0.0, 0.0)}
    score = server.call(Evaluate("", sums), Score)
    assert isinstance(score, Score) and score.host == {}
    assert {name: score.devices[name] for name in ("accuracy", "loss")} == {"accuracy": 0.75, "loss": 0.5}
    assert np.isnan(score.devices["odd"])


def test_a_model_that_casts_to_its_own_types_is_scored_and_keeps_small_steps(
    root: Path, tmp_path: Path, zygote: Zygote
) -> None:
    work = replace(WORK, model=ModelSpec("nets:Casts", ("nets.py",)))
    with started(zygote, root, tmp_path / "log") as server:
        tensors = server.prepare_server(work)
        spans = {tensor.name: span for tensor, span in layout.spans(tensors)}
        size = layout.size(tensors)
        for _ in range(3):
            mean = np.zeros(size, np.float32)
            mean[spans["scale"]] = 1e-6
            weight = mean[spans["linear.weight"]].reshape(8, 64)
            rows = weight.reshape(8, 8, 8)
            rows[range(8), range(8)] = -1.0
            after = server.apply(mean, 4.0)
            score = server.call(Evaluate("held-out"), Score)
            assert isinstance(score, Score) and score.host["accuracy"] > 0.9
        assert 0 < 1 - float(after[spans["scale"]].max()) < 1e-4  # which bfloat16 could not tell from 1


def test_a_held_out_folder_that_is_not_there(server: Process) -> None:
    assert server.refused(Evaluate("nowhere")) == ("data", "missing data: there is no folder nowhere")
