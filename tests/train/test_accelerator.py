# SPDX-License-Identifier: Apache-2.0
"""The host's worker on a GPU, where there is one; what needs none is tested everywhere."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from millpond.base.errors import LocalError
from millpond.train.data.labelled_images import LabelledImages, of_arrays
from millpond.train.determinism import generators
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.local import accelerator
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.selection import SampleFolders
from millpond.train.protocol import Folder, Work
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.strategies import LocalRule
from millpond.train.task.task import Task

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")
Pair = namedtuple("Pair", "words labels")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU here")
def test_without_a_gpu_the_processor_computes_unless_a_gpu_is_wanted() -> None:
    model = nn.Linear(2, 2)
    assert accelerator.device_of(accelerator.place(model, "auto")).type == "cpu"
    with pytest.raises(LocalError, match="no GPU"):
        accelerator.place(model, "cuda")


def test_every_tensor_of_a_batch_is_moved() -> None:
    batch = {"a": [torch.zeros(2), (torch.zeros(1), "text")], "b": Pair(torch.ones(3), 4)}
    moved = accelerator.moved(batch, torch.device("meta"))
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["b"].words.is_meta
    assert moved["a"][1][1] == "text" and moved["b"].labels == 4 and isinstance(moved["b"], Pair)
    assert accelerator.moved(batch, torch.device("cpu")) is batch


class Digits:
    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))


def images() -> LabelledImages:
    rng = np.random.default_rng(0)
    return of_arrays(rng.random((40, 8, 8), np.float32), rng.integers(0, 10, 40))


@needs_gpu
@pytest.mark.parametrize(
    ("passes", "rule"),
    [(0, LocalRule()), (2, LocalRule()), (2, LocalRule(alpha=0.5)), (2, LocalRule(inner_rate=0.01))],
)
def test_an_exchange_on_a_gpu_is_that_on_the_processor(passes: int, rule: LocalRule) -> None:
    optimizer = OptimizerSpec("SGD", 0.05)
    work = WorkSpec("gpu", ModelSpec("x:y"), optimizer=optimizer, passes=passes, batch=8 * passes, local=rule)
    found = []
    for where in ("cpu", "cuda"):
        task = Task(Digits())
        model = accelerator.place(task.model(), where)  # type: ignore[arg-type]
        parameters = FlatParameters(model, local=["2.bias"] if passes else [])
        samples = SampleFolders(task, 0, [Folder("p", "csd0")], [images()])
        before = parameters.state.copy()
        LocalTrainer(parameters, task, samples, work).run(Work(1, 5, 1, (((0, 40),),)), before)
        found.append(parameters.sums.copy())
    np.testing.assert_allclose(found[0], found[1], atol=1e-3 * np.abs(found[0]).max())


@needs_gpu
def test_a_batch_is_computed_where_the_model_is() -> None:
    model = accelerator.place(Digits().model(), "auto")
    x, y = accelerator.moved(images().__getitems__(range(8)), accelerator.device_of(model))
    assert x.is_cuda and cross_entropy(model(x), y).is_cuda


@needs_gpu
def test_what_has_no_deterministic_algorithm_on_a_gpu_is_computed() -> None:
    generators.be_deterministic(1)
    try:
        model = accelerator.place(nn.Conv2d(1, 3, 1), "auto")
        labels = torch.zeros(2, 4, 4, dtype=torch.int64, device="cuda")
        loss = cross_entropy(model(torch.ones(2, 1, 4, 4, device="cuda")), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
