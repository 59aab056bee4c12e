# SPDX-License-Identifier: Apache-2.0
"""Strategies on a fleet: as a simulation in one process computes them, and resumed to the same bits."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from millpond.aggregate.encoding.layout import Encoding
from millpond.train import simulate
from millpond.train.api.fit import Fitted
from millpond.train.determinism import generators

from ..waiting import eventually
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


def simulated(
    fleet: Emulation, path: Path, strategy: str | dict[str, Any] | tuple[str, float], rounds: int, **more: Any
) -> Fitted:
    """What one process trains on the same folders; a class of the job's has an argument."""
    generators.be_deterministic(1)
    own = runpy.run_path(str(path.with_name("own_strategies.py")))
    made = own[strategy[0]](strategy[1]) if isinstance(strategy, tuple) else strategy
    folders = [fleet.directory / "devices" / name / "flash" / "private" / "digits" for name in DEVICES]
    keys = {"batch": 16, "learning_rate": 0.05, "tell": lambda line: None, **more}
    return simulate(own["Task"](), folders, rounds=rounds, strategy=made, **keys)


def test_one_of_the_users_own_is_resumed_and_trains_as_in_one_process(fleet: Emulation) -> None:
    path = job(fleet, '{ factory = "own_strategies:Damped", momentum = 0.7 }')
    number, _ = model_of(fleet, "train", path)
    again, found = model_of(fleet, "resume", str(number), "--rounds", "4")
    assert again == number
    model = simulated(fleet, path, ("Damped", 0.7), 4).model
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_differences_are_normalized_as_in_one_process(fleet: Emulation) -> None:
    path = job(fleet, '"fednova"')
    _, found = model_of(fleet, "train", path)
    model = simulated(fleet, path, "fednova", 2).model
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def parameters_sent(fleet: Emulation) -> dict[str, int]:
    with fleet.client() as client:
        return {name: ledger.sent["parameters"] for name, ledger in client.ledgers().items()}


def audited(fleet: Emulation, device: str, number: int) -> int:
    """Verify the audit log of a device, and return the bytes of parameters of a job in it."""
    told = fleet.millpond("audit", device, "--verify", "--job", str(number), "--format", "json")
    assert told.code == 0, told
    found = json.loads(told.out)["summary"]
    assert "parameters" not in found["unlogged"], found["unlogged"]
    return sum(row["answers"]["sent"].get("parameters", 0) for row in found["rows"])


def test_what_is_a_devices_own_stays_there_through_restarts(fleet: Emulation) -> None:
    """Local layers and personal models, on a fleet as in one process; an agent dies between two rounds."""
    personal = ("--set", 'federated.local=["3.*"]', "--set", 'evaluate.on=["devices"]')
    path, before = job(fleet, '{ name = "apfl", alpha = "adaptive" }'), parameters_sent(fleet)
    number, _ = model_of(fleet, "train", path, *personal, "--set", "federated.quorum=1.0")
    console = fleet.directory / "devices" / "csd1" / "console.log"
    starts = console.read_text().count("csd1 is ready at")
    fleet.agent("csd1").kill()
    eventually(lambda: console.read_text().count("csd1 is ready at") > starts, "a new agent", 120)
    fleet.wait_ready()
    _, found = model_of(fleet, "resume", str(number), "--rounds", "4")
    table = {"name": "apfl", "alpha": "adaptive"}
    model = simulated(fleet, path, table, 4, local=["3.*"], held_out=0.1)
    assert all(torch.equal(found[name], value) for name, value in model.model.state_dict().items())
    with fleet.client() as client:
        scores = [each.scores for each in client.job(number).rounds]
    assert scores == [{"devices": figures} for figures in model.devices]
    own = 64 * 16 + 16
    sent = {name: count - before[name] for name, count in parameters_sent(fleet).items()}
    assert sent == dict.fromkeys(DEVICES, 4 * 4 * own)
    eventually(lambda: audited(fleet, "csd1", number) == 4 * 4 * own, "the log of the killed agent", 20, 0.5)
    log = (fleet.fleet.job_directory(number) / "job.log").read_text()
    assert "1040 of 1210 values are trained and exchanged, 170 stay on their devices: 14.0 % of" in log

    median = job(fleet, '"median"')
    settings = ("train.encoding=int8", "federated.rounds=1", 'data.public="public/digits"')
    options = [text for setting in settings for text in ("--set", setting)]
    number, _ = model_of(fleet, "train", median, *personal, *options)
    assert len(list((fleet.fleet.job_directory(number) / "state").iterdir())) == 1  # the host's worker's own
    again = {name: count - before[name] - sent[name] for name, count in parameters_sent(fleet).items()}
    assert again == dict.fromkeys(DEVICES, Encoding("int8").size(own))
    misspelt = ("--set", 'federated.local=["4.*"]', *personal[2:])
    told = fleet.millpond("train", median, *misspelt)
    assert told.code != 0 and "federated: local: '4.*' is no parameter or buffer of the model" in told.err


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
