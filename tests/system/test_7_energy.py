# SPDX-License-Identifier: Apache-2.0
"""Energy of a synchronous job on emulated devices of declared watts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..waiting import eventually
from .support import WATTS, Emulation, Trained, create

pytestmark = pytest.mark.timeout(240)


def test_epochs_say_what_an_image_took_and_how_that_is_known(digits: Trained) -> None:
    said = [line for line in digits.result.out.splitlines() if line.startswith("epoch")]
    assert all(line.endswith(" J per image (declared watts)") for line in said), said
    assert "J/image" in digits.result.out
    info = digits.info
    assert info.ended is not None
    total = 0.0
    for done, line in zip(digits.rounds, said, strict=True):
        assert done.energy == dict.fromkeys(WATTS, "declared")
        figure = sum(done.joules.values()) / done.samples
        assert float(line.split("; ")[-1].split()[0]) == pytest.approx(figure, rel=0.01)
        least, most = seconds_that_fit(done.joules)
        assert least <= 1.001 * most, done
        assert most >= 0.999 * done.seconds, "the epoch lasted at least as long as its steps"
        total += least
    assert total <= info.ended - info.created


def seconds_that_fit(joules: dict[str, float]) -> tuple[float, float]:
    """An epoch of so many took everybody no less than idle and no more than busy."""
    least = max(joules[name] / busy for name, (_, busy) in WATTS.items())
    return least, min(joules[name] / idle for name, (idle, _) in WATTS.items())


def test_devices_show_the_power_that_they_take(fleet: Emulation) -> None:
    def known() -> bool:
        return all(device.watts is not None for device in fleet.devices().values())

    eventually(known, "the power of all devices", every=0.1)
    shown = json.loads(fleet.millpond("devices", "--format", "json").out)["devices"]
    for device in shown:
        idle, busy = WATTS[device["name"]]
        assert idle - 0.01 <= device["watts"] <= busy + 0.01
        assert device["load"]["energy"] == "declared"
    assert "(declared)" in fleet.millpond("devices").out


def test_a_declaration_that_can_not_be_starts_nothing(tmp_path: Path) -> None:
    emulation = create(tmp_path, ("csd0",))
    path = emulation.directory / "fleet.toml"
    path.write_text(f"{path.read_text()}watts = {{ idle = 7.5, busy = 2.0 }}\n")
    result = emulation.millpond("emulate")
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert "fleet.toml: device: csd0: watts: busy: 2 is not between 7.5" in result.err
