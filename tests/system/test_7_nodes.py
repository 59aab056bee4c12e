# SPDX-License-Identifier: Apache-2.0
"""Updates that devices add among themselves: the host's bits, and a host that adds where a device fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .support import Emulation

pytestmark = pytest.mark.timeout(300)

DEVICES = ("csd0", "csd1", "csd2")
JOB = """\
name = "nodes"
aggregate = "{aggregate}"
topology = "{topology}"
[data]
private = "private/digits"
test = "test"
[model]
factory = "nodes_model:Net"
files = ["nodes_model.py"]
[train]
batch = 16
learning_rate = 0.05
[federated]
rounds = 3
strategy = "{strategy}"
"""
MODEL = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 10)
        )
"""


def job(fleet: Emulation, aggregate: str, topology: str = "auto", strategy: str = "fedavg") -> Path:
    folder = fleet.base / "job-files" / "nodes"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "test").exists():
        (folder / "test").symlink_to(fleet.base / "test")
    (folder / "nodes_model.py").write_text(MODEL)
    (folder / "job.toml").write_text(JOB.format(aggregate=aggregate, topology=topology, strategy=strategy))
    return folder / "job.toml"


def train(fleet: Emulation, path: Path) -> tuple[bytes, str, list[dict[str, tuple[int, int]]]]:
    """Train; returns the model, the log, and each round's bytes to and from the devices' tunnels."""
    result = fleet.millpond("train", path, "--format", "json", timeout=240)
    assert result.code == 0, f"{result}\n{fleet.logs()}"
    document = json.loads(result.out)
    folder = fleet.directory / "jobs" / str(document["job"]["id"])
    traffic = [round_["tunnel"] for round_ in document["rounds"]]
    return (folder / "model.safetensors").read_bytes(), (folder / "job.log").read_text(), traffic


def test_devices_add_to_the_bits_of_the_host(shared_fleet: Emulation) -> None:
    fleet = shared_fleet
    expected, log, _ = train(fleet, job(fleet, "host"))
    assert "add the updates" not in log
    for topology in ("star", "ring"):
        model, log, traffic = train(fleet, job(fleet, "csd1", topology))
        assert model == expected
        print(log)
        assert re.search(rf"devices add the updates: .* for a {topology} with the root csd1", log)
        assert "WARNING" not in log
    size = 4 * (64 * 9 + 64 + 4 * 64 + 40960 + 10)
    to, back = (sum(each[name][way] for name in DEVICES) for way in (0, 1) for each in traffic[-1:])
    print(traffic, size, to, back)
