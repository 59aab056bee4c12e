# SPDX-License-Identifier: Apache-2.0
"""The fleet directory: making it and adding devices, without a change to others; what a power cut leaves."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from millpond.agent.config import read as read_agent
from millpond.base.errors import ConfigError, LocalError
from millpond.host.emulation import qemu_devices
from millpond.host.fleet import directory, provisioning
from millpond.host.fleet import directory as fleets
from millpond.host.fleet.authority import Authority, write_private, write_public
from millpond.host.fleet.directory import DeviceConfig
from millpond.host.remote import ssh
from millpond.images.format import seed
from millpond.images.runtime import qemu
from millpond.images.runtime.qemu import DISK
from millpond.linux import files

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


def write(directory: Path, text: str) -> Path:
    (directory / "fleet.toml").write_text(text)
    return directory


def devices(*names: str) -> str:
    return 'name = "f"\n' + "".join(f'[[device]]\nname = "{name}"\n' for name in names)


def test_every_device_has_its_own_network(tmp_path: Path) -> None:
    found = directory.read(write(tmp_path, devices("a", "b", "c")))
    assert [found.addresses(name).host for name in "abc"] == ["10.77.0.1/30", "10.77.0.5/30", "10.77.0.9/30"]
    assert [found.addresses(name).device_ip for name in "abc"] == ["10.77.0.2", "10.77.0.6", "10.77.0.10"]
    assert len(found.interface("a" * 12)) < 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (devices("a", "a"), "named twice"),
        (devices("Csd0"), "cannot be a device's name"),
        (devices("host"), "not 'host'"),
        (devices("-a"), "cannot be"),
        (devices("a" * 13), "cannot be"),
        (devices(""), "cannot be"),
        (devices("a/b"), "cannot be"),
        (devices("csd\u00e9"), "cannot be"),
        (devices("csd\u00b2"), "cannot be"),
        ('network = "10.0.0.0/30"\n' + devices("a", "b"), "too small"),
        ('network = "10.0.0.1/30"\n' + devices("a"), "network"),
        ('network = "nonsense"\n' + devices("a"), "network"),
        (devices("a") + 'bord = "emulated"\n', "board"),
        (devices("a") + 'board = "paper"\n', "board"),
        (devices("a") + "watts = { idle = 3, busy = 2 }\n", "device: a: watts: busy: 2 is not between 3"),
        (devices("a") + "watts = { idle = nan, busy = 2 }\n", "device: a: watts: idle: nan"),
        ("watts = { idle = -3, busy = 2 }\n" + devices("a"), "fleet.toml: watts: idle: -3"),
        ("watts = { idle = 3 }\n" + devices("a"), "busy"),
        ("zygote_idle = 0.5\n" + devices("a"), "fleet.toml: zygote_idle: 0.5 is not between 1 and 86400"),
        ("silence = 1\n" + devices("a"), "fleet.toml: silence: 1.0 is not between 2 and 600"),
        ("silence = nan\n" + devices("a"), "fleet.toml: silence: nan is not between 2 and 600"),
        ("[[device", "fleet.toml"),
        ("", "name"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        directory.read(write(tmp_path, text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_fleet_and_no_device_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="millpond init"):
        directory.read(tmp_path)
    two = directory.read(write(tmp_path, devices("a", "b")))
    for asked in (two.device, two.addresses):
        with pytest.raises(ConfigError, match="it has a, b"):
            asked("c")


def test_a_new_fleet_can_be_read_and_keeps_its_secrets(tmp_path: Path) -> None:
    os.umask(before := os.umask(0))  # the present one, unchanged
    try:
        os.umask(0)
        made = provisioning.create(tmp_path / "f", "farm", ("csd0", "csd1"))
    finally:
        os.umask(before)
    assert directory.read(tmp_path / "f").config == made.config
    secrets = [p for p in (tmp_path / "f").rglob("*") if p.suffix == ".key" or p.name in _SECRETS]
    assert len(secrets) == 8
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    config = read_agent(made.device_directory("csd1") / "etc" / "agent.toml")
    assert (config.name, config.link.address, config.board) == ("csd1", "10.77.0.6/30", "emulated")
    known = made.known_hosts.read_text().splitlines()
    assert [line.split()[:2] for line in known] == [["csd0", "ssh-ed25519"], ["csd1", "ssh-ed25519"]]
    assert len({line.split()[2] for line in known}) == 2


def test_each_device_knows_which_key_is_whose(tmp_path: Path) -> None:
    made = provisioning.create(tmp_path, "farm", ("csd0", "csd1"))
    for device in ("csd0", "csd1"):
        etc = made.device_directory(device) / "etc"
        user, admin = ((etc / name).read_text() for name in ("authorized_keys", "authorized_keys_admin"))
        assert user == made.ssh_key.with_suffix(".pub").read_text()
        assert admin == made.admin_key.with_suffix(".pub").read_text()
        assert user.split()[1] != admin.split()[1]


_SECRETS = ("key.pem", "ssh_key", "admin_key", "ssh_host_key")


def test_a_fleet_is_never_overwritten(tmp_path: Path) -> None:
    made = provisioning.create(tmp_path, "farm", ("csd0",))
    before = made.identity.key.read_bytes()
    with pytest.raises(ConfigError, match="holds a fleet already"):
        provisioning.create(tmp_path, "farm", ("csd0",))
    assert made.identity.key.read_bytes() == before


def test_a_name_that_cannot_be_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        provisioning.create(tmp_path / "f", "farm", ("csd0", "no good"))
    assert not (tmp_path / "f").exists()


def test_canaries_reach_the_agents_configuration(tmp_path: Path) -> None:
    made = provisioning.create(tmp_path, "farm", ("csd0",))
    provisioning.write_agent_config(made, "csd0", {"encrypt": "always", "canaries": {"c": "text"}})
    privacy = read_agent(made.device_directory("csd0") / "etc" / "agent.toml").privacy
    assert (privacy.encrypt, privacy.canaries) == ("always", {"c": "text"})
    assert privacy.landlock == "best-effort"  # no other kernel is asked of a device that is emulated


def test_certificates_are_of_their_authority_and_name(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca", "farm")
    identity = Authority.load(tmp_path / "ca", tmp_path / "ca" / "ca.pem").issue("csd0", tmp_path / "csd0")
    certificate = x509.load_pem_x509_certificate(identity.certificate.read_bytes())
    certificate.verify_directly_issued_by(authority.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["csd0"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert isinstance(authority.key, ec.EllipticCurvePrivateKey)
    identity.context(server=True)
    identity.context(server=False)


def test_private_files_replace_whatever_was_there(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    path = tmp_path / "new" / "key"
    write_private(path, b"1")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    write_private(path, b"2")
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert path.read_bytes() == b"2"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    write_public(tmp_path / "pub", b"3")
    assert stat.S_IMODE((tmp_path / "pub").stat().st_mode) == 0o644


Check = Callable[[], list[str]]


@pytest.fixture
def at_risk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Returns a function that names what a power cut may damage in the fleet's directory: files that had
    their names before their contents were on the disk, and names that are not there yet.
    """
    contents: set[tuple[int, int, int]] = set()
    names: dict[int, int] = {}
    really = os.fsync

    def fsync(descriptor: int) -> None:
        really(descriptor)
        found, path = os.fstat(descriptor), Path(f"/proc/self/fd/{descriptor}").readlink()
        if stat.S_ISDIR(found.st_mode):
            names[found.st_ino] = found.st_mtime_ns
        elif path.suffix == ".new":
            contents.add((found.st_ino, found.st_size, found.st_mtime_ns))

    def check() -> list[str]:
        known = ((path, path.stat()) for path in sorted(tmp_path.rglob("*")))
        return [
            path.relative_to(tmp_path).as_posix()
            for path, found in known
            if (
                (found.st_ino, found.st_size, found.st_mtime_ns) not in contents
                or names.get(path.parent.stat().st_ino) != path.parent.stat().st_mtime_ns
                if path.is_file() and path.suffix != ".lock"
                else path.suffix == ".new"
            )
        ]

    monkeypatch.setattr(os, "fsync", fsync)
    return check


def test_a_fleet_and_its_changes_are_on_the_disk(tmp_path: Path, at_risk: Check) -> None:
    """Before: none of it was, and fleet.toml could be empty, or an old one beside new keys."""
    keys = tmp_path / "keys"
    fleet = provisioning.create(tmp_path / "fleet", "farm", ("csd0", "csd1"), keys=keys)
    assert at_risk() == []
    grown = provisioning.add(fleet, DeviceConfig("csd2", lan="10.78.0.9/16"))
    assert at_risk() == []
    provisioning.write_lan(grown, DeviceConfig("csd2"))
    provisioning.remove(grown, provisioning.without(grown, "csd0"), "csd0")
    assert at_risk() == []
    assert [one.name for one in fleets.read(tmp_path / "fleet").config.device] == ["csd1", "csd2"]


def test_the_users_own_mode_of_fleet_toml_stays(tmp_path: Path) -> None:
    """Before: a file that only its owner could read was readable to all after the next command."""
    fleet = provisioning.create(tmp_path / "fleet", "farm", ("csd0",))
    path = tmp_path / "fleet" / "fleet.toml"
    path.chmod(0o640)
    provisioning.add(fleet, DeviceConfig("csd1"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_full_disk_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "known_hosts"
    files.write_durably(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_durably(path, b"new")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("known_hosts", b"old")]
