# SPDX-License-Identifier: Apache-2.0
"""Strategies on a fleet: as a simulation in one process computes them, and resumed to the same bits."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from millpond.train import simulate
from millpond.train.determinism import generators

from .support import Emulation

pytestmark = pytest.mark.timeout(300)

DEVICES = ("csd0", "csd1", "csd2")
CODE = '''
from torch import nn
from millpond.train.strategies import Combination, LocalRule, Strategy


class Task:
    """Digits, by a small network."""

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


class Damped(Strategy):
    """The median of updates near the round's state, with a momentum that is kept."""

    combine = Combination("median")
    local = LocalRule(proximal=0.1)

    def __init__(self, momentum=0.5):
        self.momentum = momentum

    def step(self, value, mean, kept):
        kept["speed"] = self.momentum * kept.get("speed", 0 * mean) + mean
        value -= kept["speed"]
'''
JOB = """\
name = "strategies"
[data]
private = "private/digits"
test = "test"
[task]
factory = "own_strategies:Task"
files = ["own_strategies.py"]
[train]
batch = 16
learning_rate = 0.05
[federated]
rounds = 2
strategy = {strategy}
"""


def job(fleet: Emulation, strategy: str) -> Path:
    """A job file; the digits of the devices are of unlike numbers."""
    folder = fleet.base / "job-files" / "strategies"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "test").exists():
        (folder / "test").symlink_to(fleet.base / "test")
    (folder / "own_strategies.py").write_text(CODE)
    (folder / "job.toml").write_text(JOB.format(strategy=strategy))
    return folder / "job.toml"


def model_of(fleet: Emulation, *command: str | Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Train or resume; returns the job's number and its model's tensors."""
    result = fleet.millpond(*map(str, command), "--format", "json", timeout=240)
    assert result.code == 0, f"{result}\n{fleet.logs()}"
    number = json.loads(result.out)["job"]["id"]
    found = load_file(fleet.directory / "jobs" / str(number) / "model.safetensors")
    return number, {name: torch.from_numpy(value) for name, value in found.items()}


def simulated(fleet: Emulation, path: Path, strategy: str | tuple[str, float], rounds: int) -> nn.Module:
    """The model that one process trains on the same folders; a class of the job's has an argument."""
    generators.be_deterministic(1)
    own = runpy.run_path(str(path.with_name("own_strategies.py")))
    made = strategy if isinstance(strategy, str) else own[strategy[0]](strategy[1])
    folders = [fleet.directory / "devices" / name / "flash" / "private" / "digits" for name in DEVICES]
    keys = {"batch": 16, "learning_rate": 0.05, "tell": lambda line: None}
    return simulate(own["Task"](), folders, rounds=rounds, strategy=made, **keys).model


def test_one_of_the_users_own_is_resumed_and_trains_as_in_one_process(fleet: Emulation) -> None:
    path = job(fleet, '{ factory = "own_strategies:Damped", momentum = 0.7 }')
    number, _ = model_of(fleet, "train", path)
    again, found = model_of(fleet, "resume", str(number), "--rounds", "4")
    assert again == number
    model = simulated(fleet, path, ("Damped", 0.7), 4)
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_differences_are_normalized_as_in_one_process(fleet: Emulation) -> None:
    path = job(fleet, '"fednova"')
    _, found = model_of(fleet, "train", path)
    model = simulated(fleet, path, "fednova", 2)
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ('{ factory = "own_strategies:Dampd" }', "module own_strategies has no class 'Dampd'"),
        ('{ factory = "own_strategies:Damped", mu = 1 }', "got an unexpected keyword argument 'mu'"),
        ('"medium"', "federated: strategy: there is no strategy 'medium'; did you mean 'median'?"),
    ],
)
def test_what_is_no_strategy_is_told_in_one_line(fleet: Emulation, strategy: str, told: str) -> None:
    result = fleet.millpond("train", job(fleet, strategy))
    assert result.code != 0 and told in result.err + result.out
