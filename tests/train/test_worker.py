# SPDX-License-Identifier: Apache-2.0
"""Real worker processes over socket pairs and shared memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, Refused
from millpond.linux import memory
from millpond.linux.confinement.sandbox import Sandbox
from millpond.linux.zygote.client import Child, Zygote
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.protocol import Evaluate, Folder, GetMomentum, PrepareWorker, Ready, Update, Work
from millpond.train.state import flat, layout
from millpond.train.worker import user_code
from millpond.wire.channel import Channel
from millpond.wire.messages import Ok

from ..job_files import written

DIGITS = WorkSpec(
    "digits",
    ModelSpec("millpond.train.zoo.models:digits_cnn"),
    seed=3,
    optimizer=OptimizerSpec("sgd", 0.05, {"momentum": 0.9}),
    passes=1,
    batch=32,
)
CANARY = "patient-4711"

NETS = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, fail="never"):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.linear = nn.Linear(64, 10)
        self.fail = fail
        if fail == "build":
            raise KeyError("patient-4711")

    def forward(self, images):
        print("forward", flush=True)
        if not self.training:  # as the worker tries it before it answers that it is ready
            return torch.zeros(len(images), 10)
        if self.fail == "forward":
            raise ValueError(f"patient-4711 {images[0, 0, 0]}")
        if self.fail == "exit":
            sys.exit("patient-4711")
        if self.fail == "disguised":
            from millpond.base.errors import LocalError
            raise LocalError("patient-4711")
        if self.fail == "hidden":
            exec("from millpond.base.errors import LocalError; raise LocalError('patient-4711')")
        if self.fail == "torch":
            return self.linear(images)
        return self.linear(self.norm(images).flatten(1)).relu()

def few(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
def wide(): return nn.Linear(2, 2).double()
text = "from millpond.base.errors import LocalError\\ndef fileless(): raise LocalError('patient-4711')"
exec(text)
"""


@dataclass(slots=True)
class Started:
    """A worker process, the coordinator's end of its channel, and the memory of both."""

    process: Child | subprocess.Popen[bytes]
    channel: Channel
    log: Path
    shared: list[int]
    code_dir: Path
    size: int = 0

    def prepare(self, work: WorkSpec, *folders: str, code: str = NETS, worker: str = "csd1") -> Ready:
        """Declare the model that the code makes here, where it can be made here."""
        written({"nets.py": code}, self.code_dir)
        try:
            tensors = flat.describe(user_code.build(work, self.code_dir)[1])
        except (Exception, SyntaxError):  # noqa: BLE001 - of the user's code
            tensors = ()
        user_code.forget(self.code_dir)
        self.size = layout.size(tensors)
        for descriptor in self.shared if self.size else ():
            os.truncate(descriptor, 4 * self.size)
        found = tuple(Folder(folder, worker) for folder in folders)
        request = PrepareWorker(work, worker, found, {}, tensors)
        return self.channel.call(request, Ready, soon())

    @property
    def state(self) -> np.ndarray:
        return np.frombuffer(memory.map_second(self.shared[0], 4 * self.size).data, np.float32)

    @property
    def values(self) -> np.ndarray:
        return np.frombuffer(memory.map_second(self.shared[1], 4 * self.size).data, np.float32).copy()

    def train(self, exchange: int, *counts: int) -> Update:
        ranges = tuple(((0, count),) for count in counts)
        return self.channel.call(Work(exchange, exchange, 1, ranges), Update, soon())


def soon() -> Deadline:
    return Deadline.after(60)


@contextmanager
def started(zygote: Zygote | None, root: Path, log: Path, *options: str) -> Iterator[Started]:
    """Start a fork of the zygote; without one, a process of its own."""
    ours, theirs = socket.socketpair()
    shared = [memory.make(name) for name in ("state", "values")]
    code_dir = written({}, log.parent / f"{log.name}.code")
    options = ("--root", str(root), "--code", str(code_dir), *options)
    process: Child | subprocess.Popen[bytes]
    with theirs, log.open("wb") as output:
        numbers = [theirs.fileno(), *shared]
        if zygote:
            arguments = ["3", "--shared", "4", "5", *options]
            process = zygote.start(Sandbox(), arguments, numbers, output.fileno())
        else:
            given = [str(numbers[0]), "--shared", str(numbers[1]), str(numbers[2]), *options]
            argv = [sys.executable, "-m", "millpond.train.worker.process", *given]
            process = subprocess.Popen(argv, pass_fds=numbers, stdout=output, stderr=output)
    try:
        with Channel(ours, "worker") as channel:
            yield Started(process, channel, log, shared, code_dir)
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        for descriptor in shared:
            os.close(descriptor)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume with samples that are easy to learn: one bright row per class."""
    root = tmp_path_factory.mktemp("volume")
    rng = np.random.default_rng(0)
    for folder, count in (("private/digits", 120), ("public/digits", 40), ("held-out", 80)):
        labels = rng.integers(0, 8, count)
        images = rng.integers(0, 60, (count, 8, 8)).astype(np.uint8)
        images[np.arange(count), labels] = 255
        (root / folder).mkdir(parents=True)
        np.save(root / folder / "images.npy", images)
        np.save(root / folder / "labels.npy", labels)
    return root


@pytest.fixture
def worker(root: Path, tmp_path: Path, zygote: Zygote) -> Iterator[Started]:
    with started(zygote, root, tmp_path / "worker.log") as made:
        yield made
    assert made.process.returncode == 0


def nets(function: str = "Net", **arguments: object) -> WorkSpec:
    return replace(DIGITS, model=ModelSpec(f"nets:{function}", ("nets.py",), arguments=dict(arguments)))


def test_rounds_of_local_training_answer_with_differences(worker: Started, root: Path) -> None:
    ready = worker.prepare(DIGITS, "private/digits", str(root / "public/digits"))
    assert (ready.parts, ready.samples, worker.size) == ((120, 40), 160, 85066)
    _, model = user_code.build(DIGITS, worker.code_dir)
    state = worker.state
    flat.read(model, state)
    losses = []
    for exchange in range(3):
        update = worker.train(exchange, 120, 40)
        assert (update.exchange, update.samples) == (exchange, 160) and update.seconds > 0
        values = worker.values
        assert update.largest == np.abs(values).max() and update.norm == pytest.approx(
            np.linalg.norm(values), rel=1e-5
        )
        state -= values / update.samples
        losses.append(update.metrics["loss"][0])
        assert update.metrics["loss"][1] == update.weight == 160
    assert losses == sorted(losses, reverse=True)


def test_missing_data_is_named_as_given(worker: Started) -> None:
    with pytest.raises(Refused) as caught:
        worker.prepare(DIGITS, "private/digit")
    expected = ("data", "missing data: there is no folder private/digit")
    assert (caught.value.code, caught.value.text) == expected
    assert worker.prepare(DIGITS, "private/digits").samples == 120


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        ("forward", "ValueError at nets.py:20 in forward; its message stays on the device"),
        ("disguised", "LocalError at nets.py:25 in forward; its message stays on the device"),
        ("hidden", "LocalError at nets.py:27 in forward; its message stays on the device"),
        ("torch", "RuntimeError at nets.py:29 in forward; its message stays on the device"),
        ("exit", "SystemExit at nets.py:22 in forward; its message stays on the device"),
    ],
)
def test_a_model_that_raises_tells_only_where(worker: Started, fail: str, text: str) -> None:
    worker.prepare(nets(fail=fail), "private/digits")
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            worker.train(0, 100)
        assert (caught.value.code, caught.value.text) == ("model", text)
    if fail != "torch":
        assert CANARY in worker.log.read_text()


@pytest.mark.parametrize(
    ("work", "code", "text"),
    [
        (nets(fail="build"), NETS, "KeyError at nets.py:13 in __init__; its message stays on the device"),
        (nets(), f"x = '{CANARY}", "SyntaxError at nets.py:1; its message stays on the device"),
        (
            nets(),
            f"import {CANARY[:7]}",
            "ModuleNotFoundError at nets.py:1 in <module>; its message stays on",
        ),
        (nets("fileless"), NETS, "LocalError at millpond/train/worker/user_code.py:"),
        (nets("Nett"), NETS, "model: factory: module nets has no callable 'Nett'"),
        (nets("wide"), NETS, "the model's tensor 'weight' is float64"),
    ],
)
def test_a_model_that_cannot_be_built(worker: Started, work: WorkSpec, code: str, text: str) -> None:
    with pytest.raises(Refused) as caught:
        worker.prepare(work, "private/digits", code=code)
    assert caught.value.code == "model"
    assert caught.value.text.startswith(text)
    assert CANARY not in caught.value.text


def test_another_model_than_the_declared_one_is_refused(worker: Started) -> None:
    request = PrepareWorker(DIGITS, "csd1", (Folder("private/digits", "csd1"),), {}, ())
    with pytest.raises(Refused, match="csd1 builds another model than the host"):
        worker.channel.call(request, Ready, soon())


def test_not_a_number_is_sent_for_the_host_to_refuse(worker: Started) -> None:
    worker.prepare(DIGITS, "private/digits")
    worker.state[:] = np.nan
    update = worker.train(0, 120)
    assert np.isnan(update.largest) and np.isnan(update.metrics["loss"][0])


def test_a_request_that_is_not_a_workers(worker: Started) -> None:
    worker.prepare(DIGITS, "private/digits")
    for request in (Ok(), GetMomentum(), Evaluate("held-out")):
        with pytest.raises(Refused, match=f"does not serve '{request.NAME}'"):
            worker.channel.call(request, Ready, soon())


def test_two_fresh_processes_train_to_the_same_bits(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    """One that has loaded torch itself, and one that is a fork of a process that has."""
    work = replace(nets(), optimizer=OptimizerSpec("adam", 0.01), passes=2)
    results = []
    with (
        started(None, root, tmp_path / "a") as first,
        started(zygote, root, tmp_path / "b", "--errors", "full") as second,
    ):
        for worker in (first, second):
            worker.prepare(work, "private/digits")
            worker.state[:] = 0.01
            if worker is second:  # what was trained before must not matter
                worker.train(9, 120)
            results.append((worker.train(4, 120).metrics, worker.values.tobytes()))
        assert results[0] == results[1]
        assert np.frombuffer(results[0][1], np.float32).any()

        second.prepare(nets(fail="forward"), "private/digits")
        with pytest.raises(Refused, match=rf"ValueError: {CANARY} tensor.* \(at nets.py:20 in forward\)"):
            second.train(0, 120)
    assert (first.process.returncode, second.process.returncode) == (0, 0)
    assert "forward" in first.log.read_text()


def test_a_payload_where_none_belongs_ends_the_worker(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    with started(zygote, root, tmp_path / "log") as worker:
        worker.prepare(nets(), "private/digits")
        worker.channel.send(Work(0, 0, 1, (((0, 9),),)), soon(), bytes(8))
        with pytest.raises(Refused, match="'work' came with 8 bytes where 0 belong") as caught:
            worker.channel.expect(Update, soon())
        assert caught.value.code == "protocol"
        with pytest.raises(ConnectionLost):
            worker.channel.receive(soon())
    assert worker.process.returncode == 1


def test_before_prepare_only_the_order_is_said(worker: Started) -> None:
    for request in (Work(0, 0, 1, ()), Evaluate("held-out")):
        with pytest.raises(Refused, match=f"'{request.NAME}' came before 'prepare'"):
            worker.channel.call(request, Ok, soon())
    worker.process.send_signal(signal.SIGINT)
    with pytest.raises(Refused):
        worker.channel.call(GetMomentum(), Ok, soon())


def test_a_message_cut_off_is_not_a_clean_end(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    with started(zygote, root, tmp_path / "log") as worker:
        worker.channel.sock.sendall(b"mp\0\1")
    assert worker.process.returncode == 1


def test_garbage_ends_the_worker(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    with started(zygote, root, tmp_path / "log") as worker:
        worker.channel.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(Refused, match="does not speak millpond's protocol"):
            worker.channel.expect(Ready, soon())
    assert worker.process.returncode == 1


def test_starting_does_not_wait_for_torch() -> None:
    """The coordinator runs without torch, and a worker ties itself to its parent before it loads it."""
    names = (
        "job.spec",
        "protocol",
        "state.layout",
        "state.checkpoint",
        "job.file",
        "worker.process",
    )
    imports = "; ".join(f"import millpond.train.{name}" for name in names)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
