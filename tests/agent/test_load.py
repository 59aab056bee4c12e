# SPDX-License-Identifier: Apache-2.0
"""The agent's report of its load, and the choice of the energy sensors that are the device's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from millpond.agent import load
from millpond.agent.config import AgentConfig, LinkConfig
from millpond.energy.joules import Watts

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
