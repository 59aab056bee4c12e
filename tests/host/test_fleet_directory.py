# SPDX-License-Identifier: Apache-2.0
"""The fleet directory: creating and loading it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from millpond.agent.config import read as read_agent
from millpond.base.errors import ConfigError, LocalError
from millpond.energy.joules import Watts
from millpond.host.fleet import directory, provisioning
from millpond.host.fleet.authority import Authority, create_ssh_key, write_private, write_public
from millpond.linux.file_lock import locked


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
        ("zygote_idle = 0.5\n" + devices("a"), "fleet.toml: zygote_idle must be 1 to 86400 seconds"),
        ("silence = 1\n" + devices("a"), "fleet.toml: silence must be 2 to 600 seconds"),
        ("silence = nan\n" + devices("a"), "fleet.toml: silence must be 2 to 600 seconds"),
        ("[[device", "fleet.toml"),
        ("", "name"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        directory.read(write(tmp_path, text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_watts_are_of_the_host_and_of_each_device(tmp_path: Path) -> None:
    text = devices("a", "b") + "watts = { idle = 2, busy = 7.5 }\n[watts]\nidle = 60\nbusy = 200\n"
    config = directory.read(write(tmp_path, text)).config
    assert config.watts == Watts(60.0, 200.0)
    assert [device.watts for device in config.device] == [None, Watts(2.0, 7.5)]


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


def test_an_ssh_key_and_its_public_line_belong_together(tmp_path: Path) -> None:
    line = create_ssh_key(tmp_path / "key", "me@farm")
    assert (tmp_path / "key.pub").read_text() == f"{line}\n"
    assert line.split()[0] == "ssh-ed25519"
    assert line.endswith(" me@farm")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_lock_is_held_by_one_and_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "host.lock"
    with (
        locked(path, "taken"),
        pytest.raises(LocalError, match=rf"taken .*{os.getpid()}"),
        locked(path, "taken"),
    ):
        pass
    with locked(path, "taken"):
        pass
