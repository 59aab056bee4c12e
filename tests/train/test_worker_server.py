# SPDX-License-Identifier: Apache-2.0
"""The parameter server: a real process, and the memory that it shares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from millpond.linux.zygote.client import Zygote
from millpond.train.job.spec import ModelSpec
from millpond.train.protocol import (
    Evaluate,
    PrepareServer,
    PrepareWorker,
    Restore,
    Score,
    ServerReady,
)
from millpond.train.state import flat, layout
from millpond.train.strategies import Combination, LocalRule
from millpond.train.worker import user_code
from millpond.wire.messages import Ok

from .worker_process import (
    FOLDERS,
    NETS,
    WORK,
    Process,
    of,
    started,
    state_of,
)


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
    request = PrepareServer(work, test="held-out")
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


def test_the_first_state_is_that_of_the_seed(server: Process, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    expected = np.empty(520, np.float32)
    flat.read(user_code.build(WORK, tmp_path)[1], expected)
    user_code.forget(tmp_path)
    assert np.array_equal(server.state, expected) and expected.any()


def test_means_are_applied_at_a_part_of_the_rate(server: Process) -> None:
    before, mean = server.state.copy(), state_of(1, 520)
    first = server.apply(mean)
    assert np.allclose(first, before - 0.5 * mean, atol=1e-6)
    second = server.apply(mean, 0.25)
    assert np.allclose(second, first - 0.125 * (0.9 * mean + mean), atol=1e-6)


def test_one_goes_on_from_the_momentum_of_another(server: Process) -> None:
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


def test_a_strategy_applies_differences_and_says_what_others_do(server: Process) -> None:
    local = replace(WORK, passes=1, batch=8)
    table = {"name": "fednova", "learning_rate": 0.5, "mu": 0.25}
    ready = server.call(PrepareServer(local, table), ServerReady)
    assert isinstance(ready, ServerReady)
    assert (ready.local, ready.combine) == (LocalRule(0.25, normalized=True), Combination())
    before, mean = server.state.copy(), state_of(1, 520)
    assert np.allclose(server.apply(mean, 3.0), before - 0.5 * 3 * mean, atol=1e-6)
    ready = server.call(PrepareServer(local, {"name": "trimmed", "share": 0.25}), ServerReady)
    assert isinstance(ready, ServerReady) and ready.combine == Combination("trimmed", 0.25)


def test_the_state_in_memory_is_scored(server: Process) -> None:
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


def test_a_strategy_that_makes_no_sense_in_steps_is_refused(server: Process) -> None:
    steps = replace(WORK, passes=1, steps=4)
    told = "votes of late updates and of parts of an epoch are no votes of devices; it is for [federated]"
    refused = server.refused(PrepareServer(steps, {"name": "median"}))
    assert refused == ("model", f"synchronous: strategy: {told}")
