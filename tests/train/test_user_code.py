# SPDX-License-Identifier: Apache-2.0
"""Models from a user's own code, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from millpond.base.errors import LocalError
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.worker import user_code

from ..job_files import written

CODE = """
from torch import nn
from helper_of_model import width
def build(classes): return nn.Linear(width, classes)
def table(): return {}
constant = 5
"""
LAZY = """
import torch

def build(run=False):
    made = torch.nn.LazyLinear(2)
    if run:
        made(torch.zeros(1, 8))
    return made
"""


def build(model: ModelSpec, code: Path, seed: int = 0, *, task: bool = False) -> nn.Module:
    return user_code.build(WorkSpec("tests", model, task, seed=seed), code)[1]


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Path]:
    written({"user_model.py": CODE, "helper_of_model.py": "width = 4"}, tmp_path)
    yield tmp_path
    user_code.forget(tmp_path)


def test_a_lazy_module_without_shapes_is_refused_and_one_that_has_run_is_not(code: Path) -> None:
    written({"lazy.py": LAZY}, code)
    told = (
        "the model's tensor 'weight' has no shape yet, as it is of a lazy module: have the hook 'model' run"
    )
    with pytest.raises(LocalError, match=told):
        build(ModelSpec("lazy:build"), code)
    assert build(ModelSpec("lazy:build", arguments={"run": True}), code).state_dict()["weight"].shape == (
        2,
        8,
    )


def test_the_seed_decides_the_start(code: Path) -> None:
    model = ModelSpec("torch.nn:Linear", arguments={"in_features": 2, "out_features": 2})
    first, same, other = (build(model, code, seed).state_dict()["weight"] for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_another_jobs_module_takes_the_name(code: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    build(ModelSpec("user_model:build", arguments={"classes": 3}), code)
    user_code.forget(code)
    second = tmp_path_factory.mktemp("second")
    written({"user_model.py": "import torch\ndef build(): return torch.nn.Tanh()"}, second)
    assert isinstance(build(ModelSpec("user_model:build"), second), nn.Tanh)
    user_code.forget(second)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (ModelSpec("nowhere:build"), "there is no module 'nowhere'; list its file in files"),
        (ModelSpec("nowhere.inside:build"), "there is no module 'nowhere.inside'"),
        (ModelSpec("user_model:built"), "module user_model has no callable 'built'"),
        (ModelSpec("user_model:constant"), "no callable 'constant'"),
        (ModelSpec("user_model:table"), "user_model:table returned a dict, not a torch.nn.Module"),
        (
            ModelSpec("user_model:build"),
            "arguments: user_model:build: missing a required argument: 'classes'",
        ),
        (ModelSpec("user_model:build", arguments={"clases": 3}), "arguments: user_model:build: "),
    ],
)
def test_what_is_wrong_is_said(code: Path, model: ModelSpec, text: str) -> None:
    with pytest.raises(LocalError, match=text):
        build(model, code)


def test_a_module_that_the_users_file_needs_is_the_users_error(tmp_path: Path) -> None:
    written({"needy.py": "import not_installed_anywhere"}, tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        build(ModelSpec("needy:build"), tmp_path)
    user_code.forget(tmp_path)


def test_a_file_named_like_a_module_in_use(tmp_path: Path) -> None:
    written({"json.py": "build = 1"}, tmp_path)
    with pytest.raises(LocalError, match=r"json.py has the name of a module in use"):
        build(ModelSpec("json:dumps", arguments={}), tmp_path)
    user_code.forget(tmp_path)
