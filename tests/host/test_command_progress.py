# SPDX-License-Identifier: Apache-2.0
"""How far a command is that lasts: each of them, held up in the call that may last."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.host.cli import data, fleet
from millpond.host.cli.simulation import fleet as simulated_fleet
from millpond.host.cli.volumes import mounting
from millpond.host.cli.volumes.mounting import MountOptions
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import provisioning, renewal
from millpond.host.remote import certificate_renewal
from millpond.host.terminal import progress_lines
from millpond.host.terminal.progress_lines import each_told

from ..waiting import eventually
from .commands import Command
from .daemon_rig import Rig
from .test_progress import Clock

SIMULATED = Path(__file__).parents[2] / "agent" / "examples" / "fleet-36.toml"
CASES: tuple[tuple[object, str, str, str], ...] = (
    (provisioning, "_provision", "init --fleet new", "init: 0 of 3 devices, "),
    (fleet, "_taken_by_daemon", "add csd9 --board emulated", "csd9: the host daemon takes it, "),
    (DaemonClient, "remove_device", "remove csd0", "csd0: the host daemon forgets it, "),
    (fleet, "_wait_for_refusal", "revoke csd0", "csd0: the host daemon closes its connections, at most "),
    (certificate_renewal, "renew", "renew csd0", "csd0: its certificate is made, "),
    (mounting, "_started", "mount csd0 place", "csd0: its volume is mounted, "),
    (DaemonClient, "ledgers", "devices --ledger", "devices: tell their ledgers, "),
    (DaemonClient, "ask", "ask count private/x", "ask: devices answer, "),
    (data, "_look", "data check x", "data check: reads x, "),
    (DaemonClient, "job", "jobs compare 1 2", "jobs: 0 of 2 jobs, "),
    (DaemonClient, "job", "jobs plot 1", "jobs: 0 of 1 job, "),
    (DaemonClient, "prune", "jobs prune", "prune: removes the folders of jobs, "),
    (DaemonClient, "stop", "stop 1", "job 1: is stopped, "),
    (simulated_fleet, "_run_one", f"simulate {SIMULATED}", "fleet-36.toml: 0 of 3 runs, "),
)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of what lasts, which come at once."""
    lines = list[str]()
    monkeypatch.setattr(progress_lines, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress_lines, "PERIOD_SECONDS", 0.005)
    monkeypatch.setattr(progress_lines, "_tell", lines.append)
    return lines


def wait_for(told: list[str], text: str) -> None:
    eventually(lambda: any(line.startswith(text) for line in told), f"'{text}' in {told}", 20, 0.005)


@pytest.mark.parametrize(
    ("place", "name", "words", "text"), CASES, ids=[case[2].split()[0] for case in CASES]
)
def test_a_command_that_lasts_says_so(
    rig: Rig,
    command: Command,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    place: object,
    name: str,
    words: str,
    text: str,
) -> None:
    def hold_up(*_given: object, **_named: object) -> None:
        wait_for(told, text)
        raise LocalError("held up for long enough")

    monkeypatch.chdir(rig.directory)
    monkeypatch.setenv("MILLPOND_FLEET", str(rig.directory))
    monkeypatch.setattr(provisioning, "add", lambda *_: None)
    monkeypatch.setattr(renewal, "revoke", lambda *_: 1)
    monkeypatch.setattr(place, name, hold_up)
    done = command(*words.split())
    assert (done.code, done.out) == (2, "") and done.err == "millpond: held up for long enough\n"
    assert told


def test_parts_of_a_whole_tell_how_long_the_others_will_take(told: list[str]) -> None:
    clock = Clock()
    parts = each_told("init", ["a", "b", "c", "d"], "device", clock=clock)
    assert next(parts) == "a"
    wait_for(told, "init: 0 of 4 devices, 0 s so far")
    clock.now += 10
    assert next(parts) == "b"
    wait_for(told, "init: 1 of 4 devices, about 30 s left, ")
    clock.now += 30
    assert list(parts) == ["c", "d"]
    assert list(each_told("init", (), "device")) == []


def test_a_mount_that_waits_for_its_device_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, told = [LocalError("csd0 is absent"), None], list[str]()
    monkeypatch.setattr(mounting, "_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(mounting, "_started", lambda _: answers.pop(0))
    mounting.mount(tmp_path, "csd0", tmp_path / "place", MountOptions(wait=30.0), told.append)
    assert told == ["csd0 is absent: tried again for 30 s at most"]
