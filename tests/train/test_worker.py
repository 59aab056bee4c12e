# SPDX-License-Identifier: Apache-2.0
"""Real worker processes over socket pairs. A worker outlives its failures, so most tests share one."""

from __future__ import annotations

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
from millpond.linux.confinement.sandbox import Sandbox
from millpond.linux.zygote.client import Child, Zygote
from millpond.train.job.spec import DataSpec, Job, ModelSpec, TrainingSpec
from millpond.train.protocol import Evaluate, GetInitial, Initial, PrepareWorker, Ready, Score, Train, Trained
from millpond.wire.channel import Channel
from millpond.wire.messages import Ok

DIGITS = Job(
    "digits",
    DataSpec("private/digits", "held-out"),
    ModelSpec("millpond.train.zoo.models:digits_cnn"),
    seed=3,
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


@dataclass(frozen=True, slots=True)
class Started:
    """A worker process and the coordinator's end of its channel."""

    process: Child | subprocess.Popen[bytes]
    channel: Channel
    log: Path

    def prepare(self, job: Job, *folders: str, code: str = NETS, worker: str = "csd1") -> Ready:
        request = PrepareWorker(job, worker, folders, {"nets.py": code})
        return self.channel.call(request, Ready, soon())

    def initial(self, size: int) -> bytearray:
        self.channel.send(GetInitial(), soon())
        self.channel.expect(Initial, soon(), payload=4 * size)
        return self.channel.receive_payload(4 * size, soon())

    def train(self, round_: int, state: bytes | bytearray) -> tuple[Trained, bytearray]:
        self.channel.send(Train(round_), soon(), state)
        reply = self.channel.expect(Trained, soon(), payload=len(state))
        return reply, self.channel.receive_payload(len(state), soon())

    def evaluate(self, folder: str, state: bytes | bytearray) -> Score:
        return self.channel.call(Evaluate(folder), Score, soon(), state)


def soon() -> Deadline:
    return Deadline.after(60)


@contextmanager
def started(zygote: Zygote | None, root: Path, log: Path, *options: str) -> Iterator[Started]:
    """A fork of the zygote; without one, a process that is started alone."""
    ours, theirs = socket.socketpair()
    options = ("--root", str(root), *options)
    process: Child | subprocess.Popen[bytes]
    with theirs, log.open("wb") as output:
        if zygote:
            process = zygote.start(Sandbox(), ["3", *options], [theirs.fileno()], output.fileno())
        else:
            argv = [sys.executable, "-m", "millpond.train.worker.process", str(theirs.fileno()), *options]
            process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdout=output, stderr=output)
    try:
        with Channel(ours, "worker") as channel:
            yield Started(process, channel, log)
        process.wait(30)
    finally:
        process.kill()
        process.wait()


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


@pytest.fixture(scope="module")
def shared(root: Path, tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[Started]:
    with started(zygote, root, tmp_path_factory.mktemp("log") / "worker.log") as worker:
        yield worker
    assert worker.process.returncode == 0


def nets(function: str = "Net", **arguments: object) -> Job:
    return replace(DIGITS, model=ModelSpec(f"nets:{function}", ("nets.py",), dict(arguments)))


def test_a_job_from_start_to_score(shared: Started, root: Path) -> None:
    ready = shared.prepare(DIGITS, "private/digits", str(root / "public/digits"))
    assert (ready.samples, ready.size, ready.tensors[0].name) == (160, 85066, "conv1.weight")
    initial = state = shared.initial(ready.size)
    losses = []
    for round_ in range(3):
        trained, state = shared.train(round_, state)
        assert (trained.round, trained.samples) == (round_, 160)
        assert trained.seconds > 0
        losses.append(trained.loss)
    assert losses == sorted(losses, reverse=True)
    score, first = shared.evaluate("held-out", state), shared.evaluate("held-out", initial)
    assert score.samples == 80
    assert score.accuracy > first.accuracy
    assert score.loss < first.loss
    assert shared.initial(ready.size) == initial


def test_a_worker_that_only_evaluates(shared: Started) -> None:
    ready = shared.prepare(DIGITS)
    assert ready.samples == 0
    state = shared.initial(ready.size)
    assert shared.evaluate("held-out", state).samples == 80
    with pytest.raises(Refused) as caught:
        shared.train(0, state)
    assert (caught.value.code, caught.value.text) == ("data", "missing data: csd1 has no samples to train on")


def test_missing_data_is_named_as_given(shared: Started) -> None:
    with pytest.raises(Refused) as caught:
        shared.prepare(DIGITS, "private/digit")
    assert (caught.value.code, caught.value.text) == (
        "data",
        "missing data: there is no folder private/digit",
    )
    assert shared.prepare(DIGITS, "private/digits").samples == 120


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        ("forward", "ValueError at nets.py:18 in forward; its message stays on the device"),
        ("disguised", "LocalError at nets.py:23 in forward; its message stays on the device"),
        ("hidden", "LocalError at nets.py:25 in forward; its message stays on the device"),
        ("torch", "RuntimeError at nets.py:27 in forward; its message stays on the device"),
        ("exit", "SystemExit at nets.py:20 in forward; its message stays on the device"),
    ],
)
def test_a_model_that_raises_tells_only_where(shared: Started, fail: str, text: str) -> None:
    ready = shared.prepare(nets(fail=fail), "private/digits")
    state = shared.initial(ready.size)
    for attempt in (lambda: shared.train(0, state), lambda: shared.evaluate("held-out", state)):
        with pytest.raises(Refused) as caught:
            attempt()
        assert (caught.value.code, caught.value.text) == ("model", text)
    if fail != "torch":
        assert CANARY in shared.log.read_text()
    assert shared.prepare(DIGITS, "private/digits").samples == 120


@pytest.mark.parametrize(
    ("job", "code", "text"),
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
def test_a_model_that_cannot_be_built(shared: Started, job: Job, code: str, text: str) -> None:
    with pytest.raises(Refused) as caught:
        shared.prepare(job, "private/digits", code=code)
    assert caught.value.code == "model"
    assert caught.value.text.startswith(text)
    assert CANARY not in caught.value.text


def test_labels_that_the_model_has_no_output_for(shared: Started) -> None:
    ready = shared.prepare(nets("few"), "private/digits")
    with pytest.raises(Refused) as caught:
        shared.train(0, shared.initial(ready.size))
    assert caught.value.text.startswith("IndexError at millpond/train/local/training.py:")
    assert caught.value.text.endswith("in train_round; its message stays on the device")


def test_not_a_number_is_sent_for_the_aggregator_to_refuse(shared: Started) -> None:
    ready = shared.prepare(DIGITS, "private/digits")
    trained, state = shared.train(0, np.full(ready.size, np.nan, np.float32).tobytes())
    assert np.isnan(trained.loss)
    assert np.isnan(np.frombuffer(state, np.float32)).all()


def test_a_request_that_is_not_a_workers(shared: Started) -> None:
    shared.prepare(DIGITS)
    with pytest.raises(Refused, match="does not serve 'ok'"):
        shared.channel.call(Ok(), Ready, soon())


def test_code_of_a_file_that_leads_outside(shared: Started) -> None:
    with pytest.raises(Refused, match=r"'\.\./nets\.py' is not a relative file name"):
        shared.channel.call(PrepareWorker(nets(), "csd1", (), {"../nets.py": ""}), Ready, soon())


def test_two_fresh_processes_train_to_the_same_bits(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    """One that has loaded torch itself, and one that is a fork of a process that has."""
    job = replace(nets(), train=TrainingSpec(optimizer="adam", learning_rate=0.01, epochs=2))
    results = []
    with (
        started(None, root, tmp_path / "a") as first,
        started(zygote, root, tmp_path / "b", "--errors", "full") as second,
    ):
        for worker in (first, second):
            ready = worker.prepare(job, "private/digits")
            state = worker.initial(ready.size)
            if worker is second:  # what was trained before must not matter
                worker.train(9, state)
            trained, after = worker.train(4, state)
            results.append((state, trained.loss, after))
        assert results[0] == results[1]
        assert results[0][0] != results[0][2]

        second.prepare(nets(fail="forward"), "private/digits")
        with pytest.raises(Refused, match=rf"ValueError: {CANARY} tensor.* \(at nets.py:18 in forward\)"):
            second.train(0, state)
    assert (first.process.returncode, second.process.returncode) == (0, 0)
    assert "forward" in first.log.read_text()


def test_a_payload_of_the_wrong_size_ends_the_worker(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    with started(zygote, root, tmp_path / "log") as worker:
        ready = worker.prepare(nets(), "private/digits")
        worker.channel.send(Train(0), soon(), bytes(4 * ready.size - 4))
        with pytest.raises(
            Refused, match=rf"'train' came with .* bytes where {4 * ready.size} belong"
        ) as caught:
            worker.channel.expect(Trained, soon())
        assert caught.value.code == "protocol"
        with pytest.raises(ConnectionLost):
            worker.channel.receive(soon())
    assert worker.process.returncode == 1


def test_before_prepare_only_the_order_is_said(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    with started(zygote, root, tmp_path / "log") as worker:
        for request in (GetInitial(), Train(0), Evaluate("held-out")):
            with pytest.raises(Refused, match=f"'{request.NAME}' came before 'prepare'"):
                worker.channel.call(request, Ok, soon())
        worker.process.send_signal(signal.SIGINT)
        with pytest.raises(Refused):
            worker.channel.call(GetInitial(), Ok, soon())
    assert worker.process.returncode == 0


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
        "reduce.exact",
        "state.checkpoint",
        "job.file",
        "worker.process",
    )
    imports = "; ".join(f"import millpond.train.{name}" for name in names)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
