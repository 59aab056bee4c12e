# SPDX-License-Identifier: Apache-2.0
"""Adding a device: its own addresses and keys, no change to the others, and devices in QEMU."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography import x509

from millpond.agent.config import read as read_agent
from millpond.base.errors import ConfigError, LocalError
from millpond.host.emulation import qemu_devices
from millpond.host.fleet import directory as fleets
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import DeviceConfig
from millpond.host.remote import ssh
from millpond.images.format import seed
from millpond.images.runtime import qemu
from millpond.images.runtime.qemu import DISK

from .update_support import make_fleet, make_image


def test_a_device_more_is_a_real_one_in_shared_memory(tmp_path: Path) -> None:
    old = provisioning.create(tmp_path, "farm", ("csd0",))
    before = {path: path.read_bytes() for path in (tmp_path / "devices").rglob("*") if path.is_file()}
    grown = provisioning.add(old, DeviceConfig("qemu0", board="qemu-virt"))
    assert fleets.read(tmp_path).config == grown.config
    assert [(one.name, one.board) for one in grown.config.device] == [
        ("csd0", "emulated"),
        ("qemu0", "qemu-virt"),
    ]
    assert {path: path.read_bytes() for path in before} == before
    assert grown.addresses("csd0") == old.addresses("csd0")
    directory = grown.device_directory("qemu0")
    config = read_agent(directory / "etc" / "agent.toml")
    assert (config.name, config.board) == ("qemu0", "real")
    assert config.privacy.landlock == "required"
    assert (config.link.transport, config.link.ivshmem, config.link.socket) == ("ivshmem", "pci", "")
    assert config.link.address == grown.addresses("qemu0").device
    assert sorted(path.name for path in directory.iterdir()) == ["etc", "slot"]
    assert grown.peer(grown.config.device[1]) == ("ivshmem", directory / "slot" / "doorbells")
    assert grown.peer(grown.config.device[0]) == ("socket", grown.slot("csd0") / "nvme.sock")
    assert stat.S_IMODE((directory / "etc" / "key.pem").stat().st_mode) == 0o600
    assert seed.seed(directory / "etc")  # all of it can go to the device


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (DeviceConfig("csd0", board="qemu-virt"), "named twice"),
        (DeviceConfig("no good"), "cannot be a device's name"),
        (DeviceConfig("csd9", board="paper"), "there is no board 'paper'"),
        (
            DeviceConfig("csd9", board="rockpro64"),
            "csd9: the agent has no end yet for the nvme of a rockpro64",
        ),
    ],
)
def test_what_cannot_be_added_changes_nothing(tmp_path: Path, device: DeviceConfig, words: str) -> None:
    fleet = provisioning.create(tmp_path, "farm", ("csd0",))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=words):
        provisioning.add(fleet, device)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_a_person_wrote_into_the_fleet_stays(tmp_path: Path) -> None:
    provisioning.create(tmp_path, "farm", ("csd0",))
    path = tmp_path / "fleet.toml"
    path.write_text(path.read_text() + 'encrypt = "always"  # mine\n\n[watts]\nidle = 1\nbusy = 2')
    provisioning.add(fleets.read(tmp_path), DeviceConfig("qemu0", board="qemu-virt"))
    assert 'encrypt = "always"  # mine\n' in path.read_text()
    config = fleets.read(tmp_path).config
    assert [one.encrypt for one in config.device] == ["always", "auto"]
    assert config.watts is not None


def test_a_fleet_that_nothing_can_be_put_behind_stays_as_it_is(tmp_path: Path) -> None:
    provisioning.create(tmp_path, "farm", ("csd0",))
    path = tmp_path / "fleet.toml"
    path.write_text('name = "farm"\ndevice = [{ name = "csd0" }]\n')
    before = path.read_text()
    with pytest.raises(ConfigError, match=r"fleet\.toml: Cannot mutate"):
        provisioning.add(fleets.read(tmp_path), DeviceConfig("qemu0", board="qemu-virt"))
    assert path.read_text() == before


def test_after_an_attempt_that_was_cut_short_the_last_host_key_counts(tmp_path: Path) -> None:
    fleet = provisioning.create(tmp_path, "farm", ("csd0",))
    first = provisioning.add(fleet, DeviceConfig("qemu0", board="qemu-virt"))
    (tmp_path / "fleet.toml").write_text('name = "farm"\n[[device]]\nname = "csd0"\n')  # as if it had been
    second = provisioning.add(fleets.read(tmp_path), DeviceConfig("qemu0", board="qemu-virt"))
    assert [line.split()[0] for line in second.known_hosts.read_text().splitlines()] == ["csd0", "qemu0"]
    public = (first.device_directory("qemu0") / "etc" / "ssh_host_key.pub").read_text().split()[1]
    assert ssh._pinned(second.known_hosts, "qemu0").get_base64() == public


@pytest.fixture
def can_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """QEMU itself is not started here, so it need not be there."""
    monkeypatch.setattr(qemu_devices, "refusal_reason", lambda: "")


@pytest.mark.usefixtures("can_emulate")
def test_devices_in_qemu_get_a_disk_with_their_identity_once(tmp_path: Path) -> None:
    path, manifest = make_image(tmp_path / "image")
    fleet = provisioning.create(tmp_path / "f", "farm", ("csd0",))
    grown = qemu_devices.ensure(fleet, 2, path)
    assert [one.name for one in grown.config.device] == ["csd0", "qemu0", "qemu1"]
    for name in ("qemu0", "qemu1"):
        disk = grown.device_directory(name) / DISK
        assert stat.S_IMODE(disk.stat().st_mode) == 0o600
        assert disk.stat().st_size == 2048 << 20
        with disk.open("rb") as file:
            file.seek(manifest.seed.offset)
            members = seed.read(file)
        assert {one.name for one in members} >= {"agent.toml", "key.pem", "ca.pem", "ssh_host_key"}
        toml = next(one.data for one in members if one.name == "agent.toml")
        assert f'name = "{name}"'.encode() in toml
    before = (grown.device_directory("qemu0") / DISK).stat().st_mtime_ns
    again = qemu_devices.ensure(fleets.read(tmp_path / "f"), 2, tmp_path / "none")  # no image is needed now
    assert again.config == grown.config
    assert (grown.device_directory("qemu0") / DISK).stat().st_mtime_ns == before


@pytest.mark.usefixtures("can_emulate")
def test_an_image_that_is_none_for_qemu_adds_no_device(tmp_path: Path) -> None:
    fleet = provisioning.create(tmp_path / "f", "farm", ("csd0",))
    with pytest.raises(LocalError, match="make it with 'make image', or name one"):
        qemu_devices.ensure(fleet, 1, tmp_path / "none")
    path, _ = make_image(tmp_path / "image", board="generic-uefi")
    with pytest.raises(LocalError, match="a generic-uefi cannot be run in QEMU"):
        qemu_devices.ensure(fleet, 1, path)
    assert fleets.read(tmp_path / "f").config == fleet.config


@pytest.mark.usefixtures("can_emulate")
def test_a_device_gets_no_disk_of_another_board(tmp_path: Path) -> None:
    path, _ = make_image(tmp_path / "image")
    fleet = provisioning.create(tmp_path / "f", "farm", ("qemu0",))
    with pytest.raises(LocalError, match="the board of qemu0 is emulated, the image is for qemu-virt"):
        qemu_devices.ensure(fleet, 1, path)
    assert not (fleet.device_directory("qemu0") / DISK).exists()


@pytest.mark.usefixtures("can_emulate")
def test_a_damaged_image_leaves_no_disk_and_a_good_one_makes_it(tmp_path: Path) -> None:
    path, manifest = make_image(tmp_path / "image")
    fleet = make_fleet(tmp_path / "f")
    place = next(one.offset for one in manifest.image.ranges if one.offset)
    good = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(os.urandom(16))
    with pytest.raises(LocalError, match="damaged at byte"):
        qemu_devices.ensure(fleet, 1, path)
    fleet = fleets.read(tmp_path / "f")
    assert not (fleet.device_directory("qemu0") / DISK).exists()
    path.write_bytes(good)
    qemu_devices.ensure(fleet, 1, path)
    assert (fleet.device_directory("qemu0") / DISK).exists()


def test_without_qemu_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qemu, "PROGRAM", "qemu-system-none")
    path, _ = make_image(tmp_path / "image")
    fleet = provisioning.create(tmp_path / "f", "farm", ("csd0",))
    with pytest.raises(LocalError, match="is not installed: sudo apt install"):
        qemu_devices.ensure(fleet, 1, path)
    assert qemu_devices.ensure(fleet, 0, path) is fleet
    assert fleets.read(tmp_path / "f").config == fleet.config


def test_certificates_hold_where_a_boards_clock_begins(tmp_path: Path) -> None:
    """Before: they began a day before they were made, and a board whose clock stood at 1970 met no host."""
    provisioning.create(tmp_path, "farm", ("csd0",))
    found = list(tmp_path.rglob("*.pem"))
    made = [x509.load_pem_x509_certificate(p.read_bytes()) for p in found if b"BEGIN CERT" in p.read_bytes()]
    assert len(made) >= 3
    assert {each.not_valid_before_utc.year for each in made} == {1970}
