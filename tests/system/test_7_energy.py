"""Energy of a synchronous job on two emulated devices of declared watts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import EXAMPLES, Emulation, create, eventually

pytestmark = pytest.mark.timeout(240)
WATTS = {"host": (60.0, 200.0), "csd0": (2.0, 7.5), "csd1": (3.0, 9.0)}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulation]:
    emulation = create(tmp_path_factory.mktemp("energy"), ("csd0", "csd1"))
    declare(emulation)
    try:
        emulation.start()
        emulation.wait_ready()
        yield emulation
    finally:
        left = emulation.stop()
    assert not left, f"left behind: {left}"


def declare(emulation: Emulation) -> None:
    """The watts of the host and of csd0 in the fleet's file, those of csd1 on the device."""
    path = emulation.directory / "fleet.toml"
    csd0 = '[[device]]\nname = "csd0"\n'
    text = path.read_text()
    assert csd0 in text
    text = text.replace(csd0, f"{csd0}watts = {{ idle = 2.0, busy = 7.5 }}\n")
    path.write_text(f"{text}\n[watts]\nidle = 60.0\nbusy = 200.0\n")
    own = emulation.fleet.device_directory("csd1") / "etc" / "agent.toml"
    own.write_text(f"{own.read_text()}\n[watts]\nidle = 3.0\nbusy = 9.0\n")


def test_epochs_say_what_an_image_took_and_how_that_is_known(fleet: Emulation) -> None:
    path = Path(shutil.copy(EXAMPLES / "digits-sync.toml", fleet.base))
    result = fleet.millpond("train", path, timeout=180)
    assert result.code == 0, f"{result}\n{fleet.logs()}"
    said = [line for line in result.out.splitlines() if line.startswith("epoch")]
    assert all(line.endswith(" J per image (declared watts)") for line in said), said
    assert "J/image" in result.out
    with fleet.client() as client:
        info, rounds = fleet.progress(client.jobs()[-1].id)
    assert info.ended is not None
    assert max(done.accuracy for done in rounds) > 0.9
    total = 0.0
    for done, line in zip(rounds, said, strict=True):
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

    eventually(known, "the power of all devices")
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
