# SPDX-License-Identifier: Apache-2.0
"""Updates that devices add among themselves: the host's bits, and a host that adds where a device fails."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy

from ..effort import scaled
from ..waiting import eventually
from .processes import command, descendants, running
from .support import Emulation

pytestmark = pytest.mark.timeout(300)

DEVICES = ("csd0", "csd1", "csd2")
PAUSE = 0.15
"""Seconds for each batch until it is told to hurry: a job does not end before something is done to it."""
JOB = """\
name = "nodes"
aggregate = "{aggregate}"
topology = "{topology}"
repair = {repair}
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
from pathlib import Path

from torch import nn


class Net(nn.Sequential):
    def __init__(self, pause=0.0):
        super().__init__(
            nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 10)
        )
        self.pause = pause

    def forward(self, images):
        if self.training and not Path("/volume/public/hurry").exists():
            time.sleep(self.pause)
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
    scored: bool = True,
    on: str = "",
    repair: str = "true",
) -> Path:
    folder = fleet.base / "job-files" / "nodes"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "test").exists():
        (folder / "test").symlink_to(fleet.base / "test")
    (folder / "nodes_model.py").write_text(MODEL)
    text = JOB.format(**locals())
    table = f"\n[evaluate]\non = [{on}]\n" if on or not scored else ""
    (folder / "job.toml").write_text(text + table)
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


def test_devices_score_the_state_that_they_have_made(shared_fleet: Emulation) -> None:
    scores = []
    for aggregate in ("host", "csd1"):
        path = job(shared_fleet, aggregate, "star", rounds=4, on='"devices"')
        number = shared_fleet.submit(path)
        info, rounds = shared_fleet.wait_for_end(number)
        assert info.state == "done", info.error
        scores.append([round_.scores["devices"] for round_ in rounds])
    assert scores[0] == scores[1]


def test_a_strategy_whose_steps_devices_do_not_know_has_its_states_sent(shared_fleet: Emulation) -> None:
    expected, _, _ = train(shared_fleet, job(shared_fleet, "host", strategy="fedadam"))
    model, log, _ = train(shared_fleet, job(shared_fleet, "csd2", "tree", "fedadam"))
    assert model == expected and "WARNING" not in log


@pytest.mark.parametrize("scored", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_host_adds_where_a_node_dies_and_devices_again_later(
    shared_fleet: Emulation, scored: bool
) -> None:
    """The model has the bits of one that no death has touched, and no device is lost: also where the host
    has to fetch the state first.
    """
    fleet = shared_fleet
    options: dict[str, Any] = {"rounds": 10, "pause": PAUSE, "scored": scored}
    with fleet.pace() as pace:
        pace.hurry()
        expected, _, _ = train(fleet, job(fleet, "host", **options))
        pace.slow_down()
        number = fleet.submit(job(fleet, "csd1", "tree", **options))
        fleet.wait_for_rounds(number, 4)
        for process in node_processes(fleet, "csd1"):
            with contextlib.suppress(psutil.NoSuchProcess):  # it died with the one before
                process.kill()
        pace.hurry()
        info, rounds = fleet.wait_for_end(number)
    folder = fleet.directory / "jobs" / str(number)
    log = (folder / "job.log").read_text()
    assert (folder / "model.safetensors").read_bytes() == expected, log
    assert len(re.findall("devices cannot add among themselves, the host", log)) == 1
    assert "with the root csd0" in log.partition("cannot add")[2]
    assert not any(round_.missing for round_ in rounds), info
    eventually(
        lambda: not any(node_processes(fleet, name) for name in DEVICES), "the end of all nodes", every=0.1
    )


def test_a_killed_host_goes_on_from_its_last_checkpoint_to_the_same_bits(shared_fleet: Emulation) -> None:
    """Where the devices were ahead, rounds that were recorded are computed again."""
    fleet = shared_fleet
    options: dict[str, Any] = {"rounds": 10, "pause": PAUSE, "scored": False}
    with fleet.pace() as pace:
        pace.hurry()
        expected, _, _ = train(fleet, job(fleet, "host", **options))
        pace.slow_down()
        number = fleet.submit(job(fleet, "csd1", "star", **options))
        fleet.wait_for_rounds(number, 5)
        fleet.daemon().kill()
        pace.hurry()
        fleet.wait_ready()
        info, rounds = fleet.wait_for_end(number)
    folder = fleet.directory / "jobs" / str(number)
    assert info.state == "done" and [round_.round for round_ in rounds] == list(range(1, 11)), info
    log = (folder / "job.log").read_text()
    assert (folder / "model.safetensors").read_bytes() == expected, log
    assert log.count("INFO round 3:") == 2  # not saved, and computed again
    assert not any(round_.missing for round_ in rounds)


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


@pytest.mark.parametrize("topology", scaled(["tree"], ["star", "tree", "udp"]))
def test_a_state_that_the_host_does_not_need_stays_with_the_devices(
    lan_fleet: Emulation, topology: str
) -> None:
    options: dict[str, Any] = {"rounds": 6, "scored": False}
    expected, _, _ = train(lan_fleet, job(lan_fleet, "host", **options))
    model, log, traffic = train(lan_fleet, job(lan_fleet, "csd1", topology, **options))
    assert model == expected and "WARNING" not in log, log
    size = 4 * (64 * 9 + 64 + 4 * 64 + 40960 + 10)
    for round_ in traffic[2:]:
        assert max(max(way) for way in round_.values()) < 0.15 * size


def test_on_a_lan_devices_add_by_datagrams_to_the_same_bits(lan_fleet: Emulation) -> None:
    expected, _, _ = train(lan_fleet, job(lan_fleet, "host"))
    model, log, traffic = train(lan_fleet, job(lan_fleet, "csd1", "udp"))
    assert model == expected and "WARNING" not in log, log
    assert "for a star by udp with the root csd1" in log
    size = 4 * (64 * 9 + 64 + 4 * 64 + 40960 + 10)
    for round_ in traffic[1:]:
        assert size < round_["csd1"][1] < 1.5 * size
        assert all(found[0] < 0.2 * size for found in round_.values())


@pytest.mark.full
def test_datagrams_that_are_not_repaired_leave_each_device_its_own_state(lan_fleet: Emulation) -> None:
    """Nothing is lost here; no state crosses the host's links, and the model is that of repair but for
    rounding.
    """
    options: dict[str, Any] = {"rounds": 6, "scored": False}
    expected, _, _ = train(lan_fleet, job(lan_fleet, "csd1", "udp", **options))
    model, log, traffic = train(lan_fleet, job(lan_fleet, "csd1", "udp", repair="false", **options))
    assert "WARNING" not in log, log
    size = 4 * (64 * 9 + 64 + 4 * 64 + 40960 + 10)
    for round_ in traffic[2:]:
        assert max(max(way) for way in round_.values()) < 0.15 * size
    found, wanted = safetensors.numpy.load(model), safetensors.numpy.load(expected)
    assert found.keys() == wanted.keys()
    assert all(np.allclose(found[name], wanted[name], atol=1e-3) for name in found)


def test_datagrams_without_a_lan_end_the_job_by_name(shared_fleet: Emulation) -> None:
    result = shared_fleet.millpond("train", job(shared_fleet, "csd0", "udp"))
    assert result.code == 3 and "topology: 'udp' is for devices that have a LAN of their own" in result.err


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
    before = boot(fleet, "csd1")
    fleet.pid_one("csd1").kill()
    eventually(lambda: boot(fleet, "csd1") not in (before, ""), "csd1 is on again", 120, 0.1)
    fleet.wait_ready()
    _, log, _ = train(fleet, job(fleet, "csd1", "tree"))
    assert "devices add the updates" in log and "WARNING" not in log


def boot(fleet: Emulation, device: str) -> str:
    """Which agent the host has greeted last, "" if none."""
    found = fleet.devices().get(device)
    return found.welcome.boot if found and found.welcome else ""


def node_processes(fleet: Emulation, device: str) -> list[psutil.Process]:
    """The processes of reduction nodes of a device."""
    inside = descendants(fleet.pid_one(device).pid)
    return [process for process in running(inside) if "millpond.agent.node.process" in command(process)]
