# SPDX-License-Identifier: Apache-2.0
"""The energy of a job's epoch: from devices' reports, declared watts, and the host's own meter."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.energy.joules import Watts
from millpond.energy.sensors import EnergyMeter
from millpond.host.daemon.main import meter
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.power import LATE_SECONDS, DevicePower
from millpond.host.jobs import energy
from millpond.host.jobs.energy import FleetMeters, JobEnergy, Reading, Readings
from millpond.host.records.energy import describe, per_image
from millpond.host.records.jobs import Round
from millpond.wire.control_messages import DriveHealth, Load

LOAD = Load(0.5, 1, 2, None, ())
METERED = replace(LOAD, joules=5.0, energy="rapl")
ROUND = Round(
    1, {"host": {"accuracy": 0.9, "loss": 0.1}}, 10.0, 100, {"host": 60, "csd0": 30, "csd1": 10}, {}, {}
)


def reading(joules: float, at: float, *, since: str = "boot", watts: float | None = None) -> Reading:
    return Reading(joules, "declared", since, at, watts)


def taken(before: Reading, after: Reading, seconds: float) -> JobEnergy:
    first, second = Readings(100.0, {"csd0": before}), Readings(100.0 + seconds, {"csd0": after})
    return energy.between(first, second, ["csd0"])


def test_what_was_counted_in_between_is_brought_to_the_epochs_seconds() -> None:
    assert taken(reading(50, 99.5), reading(71, 109.5), 10) == JobEnergy({"csd0": 21.0}, {"csd0": "declared"})
    assert taken(reading(50, 99.5), reading(71, 109.5), 9.5).joules["csd0"] == pytest.approx(21 * 0.95)


def test_an_epoch_between_two_readings_takes_the_power_of_late() -> None:
    same = reading(50, 99.9, watts=4.0)
    assert taken(same, same, 0.25).joules == {"csd0": 1.0}
    assert taken(reading(50, 99.9), reading(50, 99.9), 0.25) == JobEnergy({}, {"csd0": "unknown"})


@pytest.mark.parametrize(
    "after",
    [
        reading(3, 109.5, since="another boot"),
        reading(300, 109.5, since="another boot"),
        reading(49, 109.5),
        replace(reading(71, 109.5), source="rapl"),
    ],
)
def test_a_meter_that_was_begun_anew_is_not_known(after: Reading) -> None:
    assert taken(reading(50, 99.5), after, 10) == JobEnergy({}, {"csd0": "unknown"})


def test_workers_with_and_without_known_energy() -> None:
    before = Readings(0.0, {"host": reading(0, 0), "csd0": reading(0, 0), "gone": reading(0, 0)})
    after = Readings(10.0, {"host": reading(100, 10), "csd0": reading(20, 10), "came": reading(1, 10)})
    found = energy.between(before, after, ["host", "csd1", "came"])
    assert found.joules == {"csd0": 20.0, "host": 100.0}
    sources = {"came": "unknown", "csd0": "declared", "csd1": "unknown", "host": "declared"}
    assert found.energy == sources
    assert energy.between(None, after, ["host"]) == JobEnergy({}, {"host": "unknown"})


def test_joules_per_image_are_over_those_who_are_known() -> None:
    whole = replace(
        ROUND,
        joules={"host": 100.0, "csd0": 20.0, "csd1": 12.0},
        energy={"host": "rapl", "csd0": "declared", "csd1": "declared"},
    )
    assert describe(whole) == "1.32 J per image (RAPL, declared watts)"
    partly = replace(
        whole, joules={"csd0": 0.3}, energy={"host": "unknown", "csd0": "declared", "csd1": "unknown"}
    )
    assert per_image(partly) == pytest.approx(0.01)
    assert describe(partly) == "0.0100 J per image (declared watts; without host, csd1)"
    assert describe(replace(ROUND, energy={"host": "unknown"})) == ""
    assert per_image(replace(whole, workers={"csd2": 5})) is None


def test_the_host_reads_its_own_meter(tmp_path: Path) -> None:
    chip = tmp_path / "class" / "hwmon" / "hwmon0"
    chip.mkdir(parents=True)
    for name, content in (("name", "scmi"), ("energy1_input", "0")):
        (chip / name).write_text(f"{content}\n")
    meters = FleetMeters("host", EnergyMeter(tmp_path), {})
    before = meters.read()
    (chip / "energy1_input").write_text("4000000\n")
    after = meters.read()
    found = energy.between(before, after, [])
    assert found.joules == {"host": pytest.approx(4.0)}
    assert found.energy == {"host": "hwmon"}
    assert FleetMeters("host", EnergyMeter(None), {}).read().by_worker == {}


def test_the_host_of_emulated_devices_counts_what_is_declared(tmp_path: Path) -> None:
    package = tmp_path / "sys" / "class" / "powercap" / "intel-rapl:0"
    package.mkdir(parents=True)
    for name, content in (("name", "package-0"), ("energy_uj", "0"), ("max_energy_range_uj", "9")):
        (package / name).write_text(f"{content}\n")
    fleet = provisioning.create(tmp_path / "fleet", "farm", ("csd0",))
    alone = Fleet(fleet.directory, replace(fleet.config, device=()))
    declared = Fleet(fleet.directory, replace(fleet.config, watts=Watts(60, 200)))
    assert meter(alone, tmp_path / "sys").source == "rapl"
    assert meter(fleet, tmp_path / "sys").source == "unknown"
    assert meter(declared, tmp_path / "sys").source == "declared"


def test_a_device_that_knows_its_energy_is_believed() -> None:
    power = DevicePower(Watts(1, 1), emulated=False)
    assert power.take(METERED, "boot", 10.0) == METERED
    assert power.watts is None
    assert power.take(replace(METERED, joules=8.0), "boot", 10.5).joules == 8.0
    assert power.watts == pytest.approx(6.0)


def test_a_device_that_does_not_takes_what_is_declared_of_it() -> None:
    power = DevicePower(Watts(idle=2, busy=8), emulated=True)
    assert power.take(LOAD, "boot", 10.0) == replace(LOAD, joules=0.0, energy="declared")
    assert power.take(LOAD, "boot", 12.0).joules == pytest.approx(10.0)
    assert power.take(replace(LOAD, cpu=0.0), "boot", 20.0).joules == pytest.approx(26.0)
    assert power.take(replace(LOAD, cpu=math.nan), "boot", 21.0).joules == pytest.approx(28.0)
    assert power.take(replace(LOAD, cpu=99.0), "boot", 22.0).joules == pytest.approx(36.0)
    assert power.take(LOAD, "another boot", 99.0).joules == 0.0
    assert power.watts is None


def test_what_an_emulated_device_measures_is_not_believed() -> None:
    assert DevicePower(None, emulated=True).take(METERED, "boot", 1.0) == replace(LOAD, joules=None)
    found = DevicePower(Watts(1, 2), emulated=True).take(METERED, "boot", 1.0)
    assert (found.joules, found.energy) == (0.0, "declared")
    own = replace(METERED, energy="declared")
    assert DevicePower(Watts(1, 2), emulated=True).take(own, "boot", 1.0) == own


@pytest.mark.parametrize("joules", [math.nan, math.inf, -1.0, None])
def test_figures_that_can_not_be_are_none(joules: float | None) -> None:
    power = DevicePower(Watts(1, 2), emulated=False)
    assert power.take(replace(METERED, joules=joules), "boot", 1.0) == replace(METERED, joules=None)
    assert power.watts is None


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_no_figure_of_a_device_is_without_an_end(odd: float) -> None:
    """A browser reads no JSON that has NaN in it, and the commands' JSON refuses it."""
    given = Load(
        odd, 1, 2, odd, (), drive=DriveHealth("nvme", odd), time=odd, budgets=(("private/x", odd), ("y", 0.5))
    )
    found = DevicePower(None, emulated=False).take(given, "boot", 1.0)
    assert found == Load(0.0, 1, 2, None, (), drive=DriveHealth("nvme"), budgets=(("y", 0.5),))


def test_power_is_of_late_and_of_one_count() -> None:
    power = DevicePower(None, emulated=False)
    for second in range(30):
        power.take(replace(METERED, joules=2.0 * second), "boot", float(second))
    power.take(replace(METERED, joules=58.0 + 12 * LATE_SECONDS), "boot", 29.0 + LATE_SECONDS)
    assert power.watts == pytest.approx(12.0)
    power.take(replace(METERED, joules=1.0), "boot", 40.0)
    assert power.watts is None
