# SPDX-License-Identifier: Apache-2.0
"""Energy: counters that begin anew, sensors that are not counted twice, and declared watts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from millpond.energy import joules
from millpond.energy.joules import Joules, Watts
from millpond.energy.sensors import EnergyMeter

LARGEST = 262_143_328_850


def write(root: Path, folder: str, **files: object) -> Path:
    """A folder of sysfs under ``root``."""
    path = root / "class" / folder
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_text(f"{content}\n")
    return path


def package(root: Path, number: int, energy: int, *, name: str = "package-{}") -> Path:
    text = name.format(number)
    folder = f"powercap/intel-rapl:{number}"
    return write(root, folder, name=text, energy_uj=energy, max_energy_range_uj=LARGEST)


def joules_of(meter: EnergyMeter) -> float:
    found = meter.read()
    assert found is not None
    return found.joules


def test_packages_add_up_and_what_is_in_them_does_not(tmp_path: Path) -> None:
    first, second = package(tmp_path, 0, 1_000_000), package(tmp_path, 1, 5_000_000)
    psys = package(tmp_path, 2, 0, name="psys")
    core = write(tmp_path, "powercap/intel-rapl:0:0", name="core", energy_uj=0, max_energy_range_uj=LARGEST)
    meter = EnergyMeter(tmp_path, Watts(1, 2))
    assert meter.read() == Joules(0, "rapl")
    for path in (psys, core):
        (path / "energy_uj").write_text("900000000\n")
    (first / "energy_uj").write_text("3500000\n")
    (second / "energy_uj").write_text("5500000\n")
    assert joules_of(meter) == pytest.approx(3.0)
    (first / "energy_uj").write_text("4500000\n")
    assert joules_of(meter) == pytest.approx(4.0)


def test_a_counter_that_begins_anew_goes_on(tmp_path: Path) -> None:
    path = package(tmp_path, 0, LARGEST - 999_999)
    meter = EnergyMeter(tmp_path)
    (path / "energy_uj").write_text("2000000\n")
    assert joules_of(meter) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("before", "now", "largest", "more"), [(3, 3, 9, 0), (3, 7, 9, 4), (9, 0, 9, 1), (7, 3, None, 3)]
)
def test_counters(before: int, now: int, largest: int | None, more: int) -> None:
    assert joules.counted(before, now, largest) == more


def test_a_package_that_can_not_be_read_leaves_the_others_out_too(tmp_path: Path) -> None:
    package(tmp_path, 0, 5)
    (package(tmp_path, 1, 5) / "energy_uj").unlink()
    assert EnergyMeter(tmp_path).source == "unknown"
    assert EnergyMeter(tmp_path, Watts(1, 2)).source == "declared"


def test_a_chip_with_energy_is_not_asked_for_its_power(tmp_path: Path) -> None:
    chip = write(tmp_path, "hwmon/hwmon0", name="scmi", energy1_input=1_000_000, power1_input=9_000_000)
    other = write(tmp_path, "hwmon/hwmon1", name="other", energy3_input=0)
    write(tmp_path, "hwmon/hwmon2", name="coretemp", temp1_input=40_000)
    meter = EnergyMeter(tmp_path)
    (chip / "energy1_input").write_text("4000000\n")
    (other / "energy3_input").write_text("500000\n")
    assert meter.read() == Joules(pytest.approx(3.5), "hwmon")  # type: ignore[arg-type]


def test_power_is_summed_over_time(tmp_path: Path) -> None:
    chip = write(tmp_path, "hwmon/hwmon0", name="ina226", power1_input=20_000_000)
    before = time.monotonic()
    meter = EnergyMeter(tmp_path)
    made = time.monotonic()
    time.sleep(0.05)
    (chip / "power1_input").write_text("40000000\n")
    asked = time.monotonic()
    found = joules_of(meter)
    assert 30 * (asked - made) <= found <= 30 * (time.monotonic() - before)


def test_the_meter_of_the_whole_machine_is_enough(tmp_path: Path) -> None:
    write(tmp_path, "hwmon/hwmon0", name="scmi", energy1_input=0)
    write(tmp_path, "hwmon/hwmon1", name="power_meter", power1_average=100_000_000)
    meter = EnergyMeter(tmp_path)
    (tmp_path / "class/hwmon/hwmon0/energy1_input").write_text("1000000000000\n")
    assert 0 < joules_of(meter) < 100_000


def test_a_sensor_that_does_not_answer_is_made_up_for_later(tmp_path: Path) -> None:
    path = package(tmp_path, 0, 0) / "energy_uj"
    meter = EnergyMeter(tmp_path)
    path.write_text("")
    assert meter.read() is None
    path.write_text("7000000\n")
    assert meter.read() == Joules(7.0, "rapl")


def test_declared_watts_follow_time_and_how_busy_it_was(tmp_path: Path) -> None:
    before = time.monotonic()
    meter = EnergyMeter(tmp_path, Watts(idle=10, busy=10))
    made = time.monotonic()
    time.sleep(0.02)
    asked = time.monotonic()
    found = meter.read()
    assert found is not None and found.source == "declared"
    assert 10 * (asked - made) <= found.joules <= 10 * (time.monotonic() - before)
    assert joules.declared(Watts(5, 25), seconds=10, busy_seconds=0, processors=4) == 50
    assert joules.declared(Watts(5, 25), seconds=10, busy_seconds=20, processors=4) == 150
    assert joules.declared(Watts(5, 25), seconds=10, busy_seconds=40.01, processors=4) == 250


def test_a_busy_machine_takes_more(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path, Watts(idle=0, busy=10))
    spent = time.process_time()
    while time.process_time() - spent < 0.1:
        pass
    assert joules_of(meter) > 0


def test_without_any_source_nothing_is_said(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path)
    assert (meter.source, meter.read()) == ("unknown", None)
