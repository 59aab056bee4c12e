# SPDX-License-Identifier: Apache-2.0
"""A device's address is the one that it was provisioned with, whatever becomes of the devices before it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.agent.config import read as read_agent
from millpond.base.errors import ConfigError
from millpond.host.fleet import directory, provisioning
from millpond.host.fleet.directory import DeviceConfig

from .daemon_rig import Rig

NAMES = ("csd0", "csd1", "csd2")


def cut_table(fleet: Path, name: str) -> None:
    """Remove a device's table as a person does it, in an editor."""
    path = fleet / "fleet.toml"
    path.write_text(re.sub(rf'\[\[device\]\]\nname = "{name}"\n(?:[^\[\n].*\n|\n)*', "", path.read_text()))


def own_addresses(fleet: Path, names: tuple[str, ...]) -> list[str]:
    """Return the addresses that the devices themselves have."""
    return [read_agent(fleet / "devices" / name / "etc" / "agent.toml").link.address for name in names]


def test_the_others_keep_their_addresses_when_a_table_is_cut(tmp_path: Path) -> None:
    provisioning.create(tmp_path, "farm", NAMES)
    cut_table(tmp_path, "csd0")
    found = directory.read(tmp_path)
    assert [device.name for device in found.config.device] == ["csd1", "csd2"]
    own = own_addresses(tmp_path, ("csd1", "csd2"))
    assert [found.addresses(name).device for name in ("csd1", "csd2")] == own
    assert [found.addresses(name).host for name in ("csd1", "csd2")] == ["10.77.0.5/30", "10.77.0.9/30"]


def test_a_new_device_takes_an_address_that_is_free(tmp_path: Path) -> None:
    provisioning.create(tmp_path, "farm", NAMES)
    cut_table(tmp_path, "csd1")
    grown = provisioning.add(directory.read(tmp_path), DeviceConfig("qemu0", board="qemu-virt"))
    assert grown.config.device[-1].address == "10.77.0.6"
    again = provisioning.add(grown, DeviceConfig("qemu1", board="qemu-virt"))
    assert again.config == directory.read(tmp_path).config
    assert own_addresses(tmp_path, ("csd0", "csd2", "qemu0", "qemu1")) == [
        f"10.77.0.{number}/30" for number in (2, 10, 6, 14)
    ]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("10.77.0.10", "device: csd2: address: csd1 has the address 10.77.0.10, too"),
        ("10.78.0.2", "10.78.0.2 is no device's address in the network 10.77.0.0/16, as 10.77.0.2 is"),
        ("10.77.0.5", "10.77.0.5 is no device's address"),
        ("nonsense", "device: csd1: address: 'nonsense'"),
    ],
)
def test_an_address_that_cannot_be_is_named(tmp_path: Path, address: str, words: str) -> None:
    provisioning.create(tmp_path, "farm", NAMES)
    path = tmp_path / "fleet.toml"
    path.write_text(path.read_text().replace("10.77.0.6", address))
    with pytest.raises(ConfigError) as caught:
        directory.read(tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_device_that_has_another_address_than_the_fleet_says_so(tmp_path: Path) -> None:
    made = provisioning.create(tmp_path, "farm", NAMES)
    assert made.address_fault("csd1") == ""
    path = tmp_path / "fleet.toml"
    path.write_text(path.read_text().replace("10.77.0.6", "10.77.0.14"))
    assert directory.read(tmp_path).address_fault("csd1") == (
        "fleet.toml has the address 10.77.0.14 for csd1, which was provisioned with 10.77.0.6"
    )


def test_a_device_is_removed_and_all_that_is_left_of_it_is_told(open_rig: Callable[[], Rig]) -> None:
    rig = open_rig()
    table = '[[device]]\nname = "csd1"\nwatts = { idle = 1, busy = 2 }\n'
    path = rig.directory / "fleet.toml"
    path.write_text(
        path.read_text().replace('[[device]]\nname = "csd1"\n', table)
        + "# mine\n[watts]\nidle = 1\nbusy = 2\n"
    )
    rig = open_rig()
    code, out, err = rig.command("remove", "csd1")
    assert (code, err) == (0, "")
    for left in (rig.directory / "devices" / "csd1", "private data", "certificate stays good"):
        assert str(left) in out
    assert [device.name for device in directory.read(rig.directory).config.device] == ["csd0", "csd2"]
    assert (
        path.read_text().endswith("# mine\n[watts]\nidle = 1\nbusy = 2\n")
        and "idle = 1, busy" not in path.read_text()
    )
    assert rig.submit() == 1
    assert list(rig.begun[1].context.devices) == ["csd0", "csd2"]
    code, _, err = rig.command("remove", "csd1")
    assert code == 2 and "no device 'csd1' in this fleet; it has csd0, csd2" in err


def test_a_device_that_a_job_uses_is_not_removed(rig: Rig) -> None:
    rig.submit("--devices", "csd0")
    rig.submit("--devices", "csd0,csd2")
    before = (rig.directory / "fleet.toml").read_text()
    for name, words in (("csd0", "csd0 is used by jobs 1, 2"), ("csd2", "csd2 is used by job 2")):
        code, _, err = rig.command("remove", name)
        assert code == 2 and words in err and err.count("\n") == 1
    assert (rig.directory / "fleet.toml").read_text() == before
    assert rig.command("remove", "csd1")[0] == 0
    rig.finish(1)
    rig.wait_for(2, "running")
    rig.finish(2)
    assert rig.command("remove", "csd2")[0] == 0
