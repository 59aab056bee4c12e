# SPDX-License-Identifier: Apache-2.0
"""Real worker processes over socket pairs and shared memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from millpond.base.errors import ConnectionLost, Refused
from millpond.linux.zygote.client import Zygote
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.protocol import Evaluate, Folder, GetMomentum, PrepareWorker, Ready, Update, Work
from millpond.train.state import flat
from millpond.train.worker import user_code

from ..job_files import written
from .worker_process import Process, soon, started

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


PRIVATE = (Folder("private/digits", "csd1"),)


@pytest.fixture
def worker(root: Path, tmp_path: Path, zygote: Zygote) -> Iterator[Process]:
    with started(zygote, root, tmp_path / "worker.log", code=NETS) as made:
        yield made
    assert made.process.returncode == 0


def train(worker: Process, exchange: int, *counts: int) -> Update:
    update = worker.call(Work(exchange, exchange, 1, tuple(((0, count),) for count in counts)), Update)
    assert isinstance(update, Update)
    return update


def nets(function: str = "Net", **arguments: object) -> WorkSpec:
    return replace(DIGITS, model=ModelSpec(f"nets:{function}", ("nets.py",), arguments=dict(arguments)))


def test_rounds_of_local_training_answer_with_differences(worker: Process, root: Path) -> None:
    ready = worker.prepare(DIGITS, (*PRIVATE, Folder(str(root / "public/digits"), "csd1")))
    assert (ready.parts, ready.samples, len(worker.state)) == ((30, 20), 50, 85066)
    _, model = user_code.build(DIGITS, worker.code_dir)
    state = worker.state
    flat.read(model, state)
    losses = []
    for exchange in range(3):
        update = train(worker, exchange, 30, 20)
        assert (update.exchange, update.samples) == (exchange, 50) and update.seconds > 0
        values = worker.values.copy()
        assert update.largest == np.abs(values).max() and update.norm == pytest.approx(
            np.linalg.norm(values), rel=1e-5
        )
        state -= values / update.samples
        losses.append(update.metrics["loss"][0])
        assert update.metrics["loss"][1] == update.weight == 50
    assert losses == sorted(losses, reverse=True)


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
def test_a_model_that_raises_tells_only_where(worker: Process, fail: str, text: str) -> None:
    worker.prepare(nets(fail=fail), PRIVATE)
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            train(worker, 0, 30)
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
def test_a_model_that_cannot_be_built(worker: Process, work: WorkSpec, code: str, text: str) -> None:
    written({"nets.py": code}, worker.code_dir)
    said, told = worker.refused(PrepareWorker(work, "csd1", PRIVATE, {}, ()))
    assert said == "model" and told.startswith(text) and CANARY not in told


def test_another_model_than_the_declared_one_is_refused(worker: Process) -> None:
    _, told = worker.refused(PrepareWorker(DIGITS, "csd1", PRIVATE, {}, ()))
    assert told.startswith("csd1 builds another model than the host")


def test_not_a_number_is_sent_for_the_host_to_refuse(worker: Process) -> None:
    worker.prepare(DIGITS, PRIVATE)
    worker.state[:] = np.nan
    update = train(worker, 0, 30)
    assert np.isnan(update.largest) and np.isnan(update.metrics["loss"][0])


def test_two_fresh_processes_train_to_the_same_bits(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    """One that has loaded torch itself, and one that is a fork of a process that has."""
    work = replace(nets(), optimizer=OptimizerSpec("adam", 0.01), passes=2)
    results = []
    with (
        started(None, root, tmp_path / "a", code=NETS) as first,
        started(zygote, root, tmp_path / "b", None, "--errors", "full", code=NETS) as second,
    ):
        for worker in (first, second):
            worker.prepare(work, PRIVATE)
            worker.state[:] = 0.01
            if worker is second:  # what was trained before must not matter
                train(worker, 9, 30)
            results.append((train(worker, 4, 30).metrics, worker.values.tobytes()))
        assert results[0] == results[1]
        assert np.frombuffer(results[0][1], np.float32).any()

        second.prepare(nets(fail="forward"), PRIVATE)
        with pytest.raises(Refused, match=rf"ValueError: {CANARY} tensor.* \(at nets.py:20 in forward\)"):
            train(second, 0, 30)
    assert (first.process.returncode, second.process.returncode) == (0, 0)
    assert "forward" in first.log.read_text()


def test_a_payload_where_none_belongs_ends_the_worker(root: Path, tmp_path: Path, zygote: Zygote) -> None:
    with started(zygote, root, tmp_path / "log", code=NETS) as worker:
        worker.prepare(nets(), PRIVATE)
        worker.channel.send(Work(0, 0, 1, (((0, 9),),)), soon(), bytes(8))
        with pytest.raises(Refused, match="'work' came with 8 bytes where 0 belong") as caught:
            worker.channel.expect(Update, soon())
        assert caught.value.code == "protocol"
        with pytest.raises(ConnectionLost):
            worker.channel.receive(soon())
    assert worker.process.returncode == 1


def test_before_prepare_only_the_order_is_said(worker: Process) -> None:
    for request in (Work(0, 0, 1, ()), Evaluate("held-out")):
        assert f"'{request.NAME}' came before 'prepare'" in worker.refused(request)[1]
    worker.process.send_signal(signal.SIGINT)
    worker.refused(GetMomentum())


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
