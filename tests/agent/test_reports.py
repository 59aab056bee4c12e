# SPDX-License-Identifier: Apache-2.0
"""What an agent tells its host of itself, its load and its log, and what it notes of the host's time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.control import HostTime
from millpond.agent.health import load
from millpond.agent.log_lines import LogLines
from millpond.energy.joules import Watts
from millpond.images.ondevice import clock
from millpond.images.ondevice.clock import Places

EXPIRY = 2_000_000_000.0


def test_the_board_reads_what_the_agent_has_noted(tmp_path: Path) -> None:
    HostTime(tmp_path).note(1_795_000_000.25, EXPIRY)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    found = clock.host_time(Places(told=tmp_path / "host-time"), now)
    assert 0 <= found - 1_795_000_000.25 < 60
    assert [path.name for path in tmp_path.iterdir()] == ["host-time"]


@pytest.mark.parametrize("told", [0.0, -1.0, EXPIRY, EXPIRY + 1, math.inf, math.nan])
def test_a_time_at_which_the_host_would_be_nobody_is_not_noted(tmp_path: Path, told: float) -> None:
    """Else a host could set a clock so far ahead that the device trusts nobody any more."""
    noted = HostTime(tmp_path)
    noted.note(told, EXPIRY)
    assert list(tmp_path.iterdir()) == []
    noted.note(EXPIRY - 1, EXPIRY)
    assert (tmp_path / "host-time").exists()


def test_it_is_noted_once_a_day(tmp_path: Path) -> None:
    noted = HostTime(tmp_path)
    noted.note(1000.0, EXPIRY)
    noted.note(2000.0, EXPIRY)
    assert (tmp_path / "host-time").read_text().startswith("1000.0 ")


def test_without_a_directory_of_its_own_it_notes_nothing() -> None:
    HostTime(None).note(1000.0, EXPIRY)


CONFIG = AgentConfig("csd0", LinkConfig("/run/slot/nvme.sock", "10.77.0.2/30"), flash="/")
WATTS = Watts(idle=2.0, busy=7.5)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Of a machine whose package has a counter."""
    package = tmp_path / "class" / "powercap" / "intel-rapl:0"
    package.mkdir(parents=True)
    for name, content in (("name", "package-0"), ("energy_uj", "0"), ("max_energy_range_uj", "1000000000")):
        (package / name).write_text(f"{content}\n")
    return tmp_path


def test_a_real_device_reads_its_own_counters(sysfs: Path) -> None:
    meter = load.meter(replace(CONFIG, watts=WATTS), sysfs)
    (sysfs / "class/powercap/intel-rapl:0/energy_uj").write_text("3000000\n")
    found = load.measure(CONFIG, ["digits"], meter)
    assert (found.joules, found.energy, found.jobs) == (3.0, "rapl", ("digits",))


def test_the_counters_that_an_emulated_device_sees_are_not_its_own(sysfs: Path) -> None:
    emulated = replace(CONFIG, board="emulated")
    for config, source in ((emulated, "unknown"), (replace(emulated, watts=WATTS), "declared")):
        meter = load.meter(config, sysfs)
        (sysfs / "class/powercap/intel-rapl:0/energy_uj").write_text("900000000\n")
        found = load.measure(config, (), meter)
        assert found.energy == source
        assert (found.joules is None) == (source == "unknown")
        assert (found.joules or 0.0) < 100


def test_without_a_source_nothing_is_said(tmp_path: Path) -> None:
    found = load.measure(CONFIG, (), load.meter(CONFIG, tmp_path))
    assert (found.joules, found.energy) == (None, "unknown")


@pytest.fixture
def lines() -> Iterator[LogLines]:
    handler = LogLines(kept=4)
    yield handler
    handler.close()


def write(lines: LogLines, *texts: str) -> None:
    for text in texts:
        lines.handle(logging.makeLogRecord({"msg": text}))


def test_nothing_was_logged_yet(lines: LogLines) -> None:
    assert lines.last(5) == ((), 0)
    assert lines.since(0) == ((), 0)


def test_the_last_lines(lines: LogLines) -> None:
    write(lines, "a", "b", "c")
    assert lines.last(2) == (("b", "c"), 3)
    assert lines.last(9) == (("a", "b", "c"), 3)
    assert lines.last(0) == ((), 3)


@pytest.mark.parametrize(
    ("known", "new"), [(0, "abc"), (1, "bc"), (3, ""), (7, "")], ids=["all", "two", "none", "of another time"]
)
def test_what_is_new(lines: LogLines, known: int, new: str) -> None:
    write(lines, "a", "b", "c")
    assert lines.since(known) == (tuple(new), 3)


def test_what_is_kept_no_more_can_be_counted(lines: LogLines) -> None:
    write(lines, *"abcdefg")
    found, count = lines.since(1)
    assert (found, count) == (tuple("defg"), 7)
    assert count - 1 - len(found) == 2  # lost
    assert lines.since(6) == (("g",), 7)
