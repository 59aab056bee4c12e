# SPDX-License-Identifier: Apache-2.0
"""Gradients, over real processes and the memory that they share; and what is so for both roles."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from millpond.base.errors import Refused
from millpond.linux import memory
from millpond.linux.zygote.client import Zygote
from millpond.train.balance.ranges import Ranges
from millpond.train.job.files import JobFile
from millpond.train.job.spec import ModelSpec
from millpond.train.protocol import (
    FIRST_VALUES,
    Apply,
    Evaluate,
    Folder,
    GetModel,
    GetMomentum,
    Model,
    PrepareServer,
    Ready,
    Score,
    ServerReady,
    Update,
    Work,
)
from millpond.train.state import checkpoint
from millpond.train.state.checkpoint import Checkpoint

from .worker_process import (
    ADDS,
    CLAMPS,
    RAISES,
    RENEWS,
    REPLACES,
    RESTORES,
    SHRINKS,
    TURNS,
    WORK,
    WRITES,
    Process,
    gradient_sums,
    of,
    soon,
    started,
    state_of,
)


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
        found = server.call(PrepareServer(of("frozen")), ServerReady)
        assert isinstance(found, ServerReady) and found.checksum
        assert [(tensor.name, tensor.shape) for tensor in found.tensors] == [("layers.1.weight", (8, 64))]
        assert [tensor.name for tensor in found.frozen] == ["own", "layers.1.bias"]
        server.channel.send(GetModel(), soon())
        whole = server.channel.expect(Model, soon(), payload=4 * 523)
        values = np.frombuffer(server.channel.receive_payload(4 * 523, soon()), np.float32)[512:]
        assert (whole.tensors, whole.size) == (found.tensors + found.frozen, 523)
        assert (values[:3] == 0.5).all() and values[3:].any()

        worker.prepare(of("frozen"), frozen=found.checksum)
        worker.state[:] = state_of(1, 512)
        update = worker.call(Work(1, 5, 1, (((0, 3),), ())), Update)
        assert isinstance(update, Update) and len(worker.values) == 512 and worker.values.any()
        other = replace(WORK, model=ModelSpec("nets:frozen", ("nets.py",), arguments={"value": 0.25}))
        with pytest.raises(
            Refused, match="csd1 builds other frozen parameters or local layers than the host"
        ):
            worker.prepare(other, frozen=found.checksum)
    # Another processor rounds random values otherwise: the host sends its own, and no others.
    checkpoint.save(root / "first.safetensors", Checkpoint(values, found.frozen, "tests", 0))
    first = JobFile("0" * 64, 1)
    with started(zygote, root, tmp_path / "c") as worker:
        (worker.code_dir / FIRST_VALUES).write_bytes((root / "first.safetensors").read_bytes())
        with pytest.raises(Refused, match="than the host: 'own' differs beyond rounding"):
            worker.prepare(other, frozen=found.checksum, first=first)
    rounded = replace(other, model=replace(other.model, arguments={"value": 0.50001}))
    with started(zygote, root, tmp_path / "d") as worker:
        (worker.code_dir / FIRST_VALUES).write_bytes((root / "first.safetensors").read_bytes())
        worker.prepare(rounded, frozen=found.checksum, first=first)


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


def test_a_worker_of_one_role_does_nothing_of_another(worker: Process, server: Process) -> None:
    for request in (Apply(1.0), GetMomentum(), GetModel(), Evaluate("held-out")):
        assert worker.refused(request) == ("protocol", f"this worker does not serve '{request.NAME}'")
    other = Work(1, 5, 1, (((1, 2),), ()))
    assert server.refused(other) == ("protocol", "this worker does not serve 'work'")
