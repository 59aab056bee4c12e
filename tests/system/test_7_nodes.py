# SPDX-License-Identifier: Apache-2.0
"""Updates that devices add among themselves: the host's bits, and a host that adds where a device fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..waiting import eventually
from .support import Emulation, descendants, running

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
arguments = {{ pause = {pause} }}
[train]
batch = 64
learning_rate = 0.05
[federated]
rounds = {rounds}
strategy = "{strategy}"
"""
MODEL = """
import time

from torch import nn


class Net(nn.Sequential):
    def __init__(self, pause=0.0):
        super().__init__(
            nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 10)
        )
        self.pause = pause

    def forward(self, images):
        time.sleep(self.pause if self.training else 0.0)
        return super().forward(images)
"""


def job(
    fleet: Emulation,
    aggregate: str,
    topology: str = "auto",
    strategy: str = "fedavg",
    *,
    rounds: int = 3,
    pause: float = 0.0,
) -> Path:
    folder = fleet.base / "job-files" / "nodes"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "test").exists():
        (folder / "test").symlink_to(fleet.base / "test")
    (folder / "nodes_model.py").write_text(MODEL)
    (folder / "job.toml").write_text(JOB.format(**locals()))
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
        assert re.search(rf"devices add the updates: .* for a {topology} with the root csd1", log)
        assert "WARNING" not in log
    # A device reads and sends its part over its tunnel, but no more, and no state is sent after the first.
    size = 4 * (64 * 9 + 64 + 4 * 64 + 40960 + 10)
    for to, back in traffic[-1].values():
        assert max(to, back) < 3 * size


def test_a_strategy_whose_steps_devices_do_not_know_has_its_states_sent(shared_fleet: Emulation) -> None:
    expected, _, _ = train(shared_fleet, job(shared_fleet, "host", strategy="fedadam"))
    model, log, _ = train(shared_fleet, job(shared_fleet, "csd2", "tree", "fedadam"))
    assert model == expected and "WARNING" not in log


def test_the_host_adds_where_a_node_dies_and_devices_again_later(shared_fleet: Emulation) -> None:
    """The model has the bits of one that no death has touched, and no device is lost."""
    fleet = shared_fleet
    options: dict[str, Any] = {"rounds": 10, "pause": 0.05}
    expected, _, _ = train(fleet, job(fleet, "host", **options))
    number = fleet.submit(job(fleet, "csd1", "tree", **options))
    fleet.wait_for_rounds(number, 2)
    for process in node_processes(fleet, "csd1"):
        process.kill()
    info, rounds = fleet.wait_for_end(number)
    folder = fleet.directory / "jobs" / str(number)
    log = (folder / "job.log").read_text()
    assert (folder / "model.safetensors").read_bytes() == expected, log
    assert len(re.findall("devices cannot add among themselves, the host", log)) == 1
    assert "with the root csd0" in log.partition("cannot add")[2]
    assert not any(round_.missing for round_ in rounds), info
    assert not [name for name in DEVICES if node_processes(fleet, name)]


def test_a_root_that_is_no_device_of_the_job_ends_it_by_name(shared_fleet: Emulation) -> None:
    result = shared_fleet.millpond("train", job(shared_fleet, "csd9"))
    assert result.code == 3 and "aggregate: 'csd9': no device that takes part" in result.err


def test_on_a_lan_updates_do_not_cross_the_host(lan_fleet: Emulation) -> None:
    fleet = lan_fleet
    size = 4 * (64 * 9 + 64 + 4 * 64 + 40960 + 10)
    expected, _, alone = train(fleet, job(fleet, "host"))
    assert all(min(way) > size for round_ in alone for way in round_.values())
    model, log, traffic = train(fleet, job(fleet, "csd0", "star"))
    assert model == expected and "WARNING" not in log, log
    for round_ in traffic[1:]:  # the state of the first is sent, and links are measured
        assert size < round_["csd0"][1] < 1.5 * size and round_["csd0"][0] < 0.2 * size
        assert all(max(round_[name]) < 0.2 * size for name in ("csd1", "csd2"))


def test_devices_add_by_themselves_where_that_is_faster(lan_fleet: Emulation) -> None:
    """And say in one line what each would take; either way it is the same model."""
    expected, _, _ = train(lan_fleet, job(lan_fleet, "host"))
    model, log, _ = train(lan_fleet, job(lan_fleet, "auto"))
    assert model == expected and "WARNING" not in log
    assert re.search(
        r"(devices add|the host adds) the updates: predicted are [0-9.]+ s an exchange for a ", log
    )


def test_a_board_is_on_the_lan_again_after_a_power_cut_and_the_host_is_not(lan_fleet: Emulation) -> None:
    fleet = lan_fleet
    routes = Path(f"/proc/{fleet.daemon().pid}/net/fib_trie").read_text()
    assert "10.77.0.1" in routes and "10.78" not in routes
    fleet.pid_one("csd1").kill()
    eventually(lambda: fleet.devices()["csd1"].state != "ready", "csd1 is off")
    fleet.wait_ready()
    _, log, _ = train(fleet, job(fleet, "csd1", "tree"))
    assert "devices add the updates" in log and "WARNING" not in log


def node_processes(fleet: Emulation, device: str) -> list[psutil.Process]:
    """The processes of reduction nodes of a device."""
    inside = descendants(fleet.pid_one(device).pid)
    return [process for process in running(inside) if "millpond.agent.node.process" in process.cmdline()]
