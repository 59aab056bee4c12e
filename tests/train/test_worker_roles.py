# SPDX-License-Identifier: Apache-2.0
"""The roles of synchronous jobs over real processes and the memory that they share."""

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

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, Refused
from millpond.linux import memory
from millpond.linux.confinement.sandbox import Sandbox
from millpond.linux.zygote.client import Zygote
from millpond.train.job.spec import DataSpec, Job, ModelSpec, SynchronousSpec, TrainingSpec
from millpond.train.protocol import (
    Apply,
    Compute,
    Computed,
    Evaluate,
    GetInitial,
    GetMomentum,
    Initial,
    Momentum,
    PrepareWorker,
    Ready,
    Restore,
    Score,
    StepApplied,
    Train,
)
from millpond.train.reduce.exact import Vector
from millpond.train.state import flat
from millpond.train.state.layout import Tensor
from millpond.train.worker import user_code
from millpond.wire.channel import Channel
from millpond.wire.messages import Message, Ok

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
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.fail = fail
        if fail.startswith("seal"):
            import fcntl
            fcntl.fcntl(vectors(fail.split()[1]), fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)

    def forward(self, images):
        if torch.initial_seed() == 13:
            os.ftruncate(vectors("sums"), 0)
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
            self.frozen.data.add_(1)
        if how == 21:
            before = weight.data.clone()
            weight.data.mul_(2)
            weight.data.copy_(before)

def vectors(what):
    links = {name: "/proc/self/fd/" + name for name in os.listdir("/proc/self/fd")}
    return next(int(n) for n, link in links.items() if os.path.lexists(link) and what in os.readlink(link))

def double(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8)).double()
def half(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8)).half()
"""
JOB = Job(
    "steps",
    DataSpec("private/digits", "held-out"),
    ModelSpec("nets:Net", ("nets.py",)),
    train=TrainingSpec(learning_rate=0.5, momentum=0.9),
    synchronous=SynchronousSpec(),
)
SHRINKS, RAISES, REPLACES, CLAMPS, ADDS, RENEWS, TURNS, FROZEN, RESTORES = range(
    13, 22
)  # what the model does when a step's seed says so


class Process:
    """A worker process, the coordinator's end of its channel, and the memory of both."""

    def __init__(self, zygote: Zygote, root: Path, log: Path, *, shared: bool = True) -> None:
        ours, theirs = socket.socketpair()
        self.shared = [memory.make(f"{what} of the tests") for what in ("states", "sums")]
        options = ["3", "--root", str(root), *(["--shared", "4", "5"] if shared else [])]
        with theirs, log.open("wb") as output:
            passed = [theirs.fileno(), *self.shared]
            self.process = zygote.start(Sandbox(), options, passed, output.fileno())
        self.channel = Channel(ours, "worker")
        self.state = self.sums = np.empty(0, np.float32)

    def prepare(self, role: str, *folders: str, job: Job = JOB) -> Ready:
        ready = self.call(PrepareWorker(job, "csd1", folders, {"nets.py": NETS}, role=role), Ready)  # type: ignore[arg-type]
        keeps = memory.map_second if role == "parameter_server" else memory.map_first
        self.state = np.frombuffer(keeps(self.shared[0], 4 * ready.size).data, np.float32)
        self.sums = np.frombuffer(memory.map_second(self.shared[1], 4 * ready.size).data, np.float32)
        return ready

    def call(self, request: Message, reply: type[Message], payload: bytes = b"") -> Message:
        return self.channel.call(request, reply, soon(), payload)

    def apply(self, mean: Vector, factor: float = 1.0) -> Vector:
        self.sums[:] = mean
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
def started(zygote: Zygote, root: Path, log: Path, *, shared: bool = True) -> Iterator[Process]:
    process = Process(zygote, root, log, shared=shared)
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
    module_worker.prepare("steps", "private/digits", "public/digits")
    return module_worker


@pytest.fixture(scope="module")
def module_server(root: Path, folder: Path, zygote: Zygote) -> Iterator[Process]:
    with started(zygote, root, folder / "server.log") as process:
        yield process
    assert process.process.returncode == 0


@pytest.fixture
def server(module_server: Process) -> Process:
    """One that keeps the model, as it is in the beginning."""
    module_server.prepare("parameter_server")
    return module_server


def state_of(seed: int, size: int) -> Vector:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32) / 10


def gradient_sums(root: Path, state: Vector, private: list[int], public: list[int]) -> tuple[Vector, float]:
    """What one process computes from the files."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    flat.write(model, state)
    images, labels = [], []
    for folder, indices in (("private/digits", private), ("public/digits", public)):
        images.append(np.load(root / folder / "images.npy")[indices])
        labels.append(np.load(root / folder / "labels.npy")[indices])
    pixels = torch.from_numpy(np.concatenate(images)).float() / 255
    loss = cross_entropy(model(pixels), torch.from_numpy(np.concatenate(labels)), reduction="sum")
    loss.backward()
    return torch.cat(
        [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
    ).numpy(), loss.item()


def test_what_a_worker_of_steps_has(worker: Process) -> None:
    ready = worker.prepare("steps", "private/digits", "public/digits")
    assert (ready.samples, ready.parts, ready.shape, ready.size) == (50, (30, 20), (1, 8, 8), 520)
    assert [tensor.name for tensor in ready.tensors] == ["layers.1.weight", "layers.1.bias"]
    assert worker.prepare("steps", "private/digits").parts == (30,)


def test_sums_over_the_samples_of_both_folders(worker: Process, root: Path) -> None:
    for step, (private, public) in enumerate([([0, 3, 29], [19]), ([5], [5]), ([], [1, 2]), ([7, 8], [])]):
        state = worker.state[:] = state_of(step, 520)
        computed = worker.call(Compute(step, 5, (tuple(private), tuple(public))), Computed)
        assert isinstance(computed, Computed)
        sums, loss = gradient_sums(root, state, private, public)
        assert (computed.step, computed.samples) == (step, len(private) + len(public))
        assert computed.loss == pytest.approx(loss, rel=1e-5)
        assert np.allclose(worker.sums, sums, rtol=1e-4, atol=1e-5) and sums.any()
        assert np.array_equal(worker.state, state)
        assert computed.seconds > 0 and 0 <= computed.busy <= 1 and computed.peak > 1 << 20


def test_a_step_that_cannot_be_is_said_and_the_worker_lives_on(worker: Process) -> None:
    assert worker.refused(Compute(1, 5, ((30,), ()))) == ("data", "sample 30 is wanted; there are 30")
    assert worker.refused(Compute(1, 5, ((), ()))) == ("data", "a step without samples is wanted")
    assert worker.refused(Compute(1, 5, ((1,),)))[0] == "data"
    code, text = worker.refused(Compute(1, RAISES, ((1,), ())))
    assert code == "model" and text.startswith("ValueError at nets.py:22 in forward; its message stays")
    worker.call(Compute(1, 5, ((1,), (2,))), Computed)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (REPLACES, "layers.1.weight"),
        (CLAMPS, "layers.1.weight"),
        (ADDS, "layers.1.bias"),
    ],
)
def test_a_model_that_changes_its_own_parameters_is_refused(worker: Process, how: int, name: str) -> None:
    """Others would not know: there would be as many models as workers."""
    worker.state[:] = state_of(how, 520)
    request = Compute(1, 5, ((1, 2), (3,)))
    worker.call(request, Computed)
    before = worker.sums.copy()
    code, text = worker.refused(replace(request, seed=how))
    told = f"the model's forward changes its parameter '{name}'; in a synchronous job only"
    assert code == "model" and text.startswith(told)
    assert np.array_equal(worker.state, state_of(how, 520))
    worker.call(request, Computed)
    assert np.array_equal(worker.sums, before)
    worker.call(replace(request, seed=RESTORES), Computed)  # what is as it was again is nobody's concern
    assert np.array_equal(worker.sums, before)


@pytest.mark.parametrize(("how", "name"), [(RENEWS, "layers.1.bias"), (TURNS, "square"), (FROZEN, "frozen")])
def test_a_parameter_that_is_another_or_frozen_is_seen(
    root: Path, tmp_path: Path, zygote: Zygote, how: int, name: str
) -> None:
    more = replace(JOB, model=ModelSpec("nets:Net", ("nets.py",), {"fail": "more"}))
    with started(zygote, root, tmp_path / "log") as process:
        ready = process.prepare("steps", "private/digits", job=more)
        process.state[:] = state_of(1, ready.size)
        process.call(Compute(1, 5, ((1,),)), Computed)
        told = (
            f"the model's forward changes its parameter '{name}'; in a synchronous job only the optimizer may"
        )
        assert process.refused(Compute(1, how, ((1,),))) == ("model", told)


def test_scoring_does_not_change_the_model(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    scoring = replace(JOB, model=ModelSpec("nets:Net", ("nets.py",), {"fail": "scores"}))
    with started(zygote, root, tmp_path / "log") as process:
        process.prepare("parameter_server", job=scoring)
        before = process.state.copy()
        code, told = process.refused(Evaluate("held-out"))
        assert code == "model" and "changes its parameter 'layers.1.bias'" in told
        assert np.array_equal(process.state, before)


def test_a_worker_cannot_take_the_memory_away(worker: Process) -> None:
    worker.state[:] = 0.25
    code, text = worker.refused(Compute(1, SHRINKS, ((1,), ())))
    assert code == "model" and text.startswith("PermissionError at nets.py:20 in forward")
    assert (worker.state == 0.25).all()
    larger = replace(JOB, model=ModelSpec("millpond.train.zoo.models:digits_cnn"))
    request = PrepareWorker(larger, "csd1", ("private/digits",), {}, role="steps")
    assert worker.refused(request)[1].startswith("PermissionError at millpond/train/worker/roles.py:")
    assert os.fstat(worker.shared[1]).st_size == 4 * 520


def test_memory_that_the_model_has_sealed_is_not_used(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    sealing = replace(JOB, model=ModelSpec("nets:Net", ("nets.py",), {"fail": "seal sums"}))
    with (
        started(zygote, root, tmp_path / "log") as process,
        pytest.raises(ValueError, match="kept from shrinking"),
    ):
        process.prepare("steps", "private/digits", job=sealing)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("double", "the model's tensor '1.weight' is float64"),
        ("half", "the model's parameter '1.weight' is not float32"),
    ],
)
def test_a_model_that_is_not_of_float32(worker: Process, name: str, text: str) -> None:
    job = replace(JOB, model=ModelSpec(f"nets:{name}", ("nets.py",)))
    request = PrepareWorker(job, "csd1", ("private/digits",), {"nets.py": NETS}, role="steps")
    code, found = worker.refused(request)
    assert code == "model" and found.startswith(text)


def test_a_worker_of_one_role_does_nothing_of_another(worker: Process, server: Process) -> None:
    for request in (Apply(1.0), GetMomentum(), Train(1), GetInitial(), Evaluate("held-out")):
        assert worker.refused(request) == ("protocol", f"this worker does not serve '{request.NAME}'")
    for other in (Compute(1, 5, ((1,),)), Train(1)):
        assert server.refused(other) == ("protocol", f"this worker does not serve '{other.NAME}'")


def test_without_shared_memory_there_are_rounds_only(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    with started(zygote, root, tmp_path / "log", shared=False) as process:
        for role in ("steps", "parameter_server"):
            request = PrepareWorker(JOB, "csd1", ("private/digits",), {"nets.py": NETS}, role=role)  # type: ignore[arg-type]
            expected = ("model", "this worker has no shared memory for a synchronous job")
            assert process.refused(request) == expected
        rounds = process.call(PrepareWorker(JOB, "csd1", ("private/digits",), {"nets.py": NETS}), Ready)
        assert isinstance(rounds, Ready) and rounds.samples == 30


def test_the_first_state_is_that_of_the_seed(server: Process, tmp_path: Path) -> None:
    server.call(GetInitial(), Initial)
    (tmp_path / "nets.py").write_text(NETS)
    expected = np.empty(520, np.float32)
    flat.read(user_code.build(JOB.model, tmp_path, JOB.seed), expected)
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

    server.prepare("parameter_server")
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
        assert isinstance(score, Score) and score.samples == 40
        scores.append(score)
    assert scores[1].accuracy > 0.9 > scores[0].accuracy
    assert scores[1].loss < scores[0].loss == pytest.approx(np.log(8), rel=1e-4)


def test_a_held_out_folder_that_is_not_there(server: Process) -> None:
    assert server.refused(Evaluate("nowhere")) == ("data", "missing data: there is no folder nowhere")


def test_a_state_that_comes_with_a_message_ends_the_worker(
    root: Path, tmp_path: Path, zygote: Zygote
) -> None:
    with started(zygote, root, tmp_path / "log") as process:
        process.prepare("steps", "private/digits")
        code, text = process.refused(Compute(1, 5, ((1,),)), bytes(4 * 520))
        assert (code, text) == ("protocol", "'compute' came with 2080 bytes where 0 belong")
        with pytest.raises(ConnectionLost):
            process.channel.receive(soon())
    assert process.process.returncode == 1
