# SPDX-License-Identifier: Apache-2.0
"""Certificates that end, are revoked or renewed: which of them are taken, and what a cut leaves behind."""

from __future__ import annotations

import datetime
import logging
import re
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from cryptography import x509

from millpond.base.errors import LocalError
from millpond.host.cli import flash
from millpond.host.fleet import authority, directory, provisioning, renewal, revocation
from millpond.host.fleet.authority import Authority
from millpond.host.fleet.directory import DeviceConfig, Fleet
from millpond.host.fleet.expiry import ExpiryLog, warnings
from millpond.host.fleet.renewal import Renewal
from millpond.host.remote import certificate_renewal
from millpond.linux.file_lock import locked
from millpond.wire.tls import CurrentContext, Identity

from ..wire.test_tls import close, handshake


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Two devices."""
    return provisioning.create(tmp_path / "fleet", "farm", ("csd0", "csd1"))


def load(fleet: Fleet) -> Authority:
    return Authority.load(fleet.ca, fleet.identity.authority)


def etc(fleet: Fleet, device: str) -> Path:
    return fleet.device_directory(device) / "etc"


def refusal(fleet: Fleet, device: str, own: Path | None = None) -> str:
    """Return why the host does not take a device with the identity in ``own``, "" if it does."""
    server = Identity.in_directory(own or etc(fleet, device))
    ours, theirs = handshake(fleet.identity, server, expect_server=device)
    close(ours, theirs)
    return "" if isinstance(ours, ssl.SSLSocket) else str(ours)


REVOKED = "csd0: certificate refused: certificate revoked"


def test_a_revoked_device_is_refused_and_no_other(fleet: Fleet) -> None:
    assert (refusal(fleet, "csd0"), refusal(fleet, "csd1")) == ("", "")
    assert renewal.revoke(fleet, "csd0") == 1
    assert (refusal(fleet, "csd0"), refusal(fleet, "csd1")) == (REVOKED, "")
    assert [revocation.is_revoked(fleet, name) for name in ("csd0", "csd1")] == [True, False]
    assert renewal.revoke(fleet, "csd1") == 1 and renewal.revoke(fleet, "csd1") == 0
    assert refusal(fleet, "csd0") == REVOKED and "revoked" in refusal(fleet, "csd1")


def test_no_clock_makes_the_list_invalid(fleet: Fleet) -> None:
    """An expired list, or one of the future, would have all devices refused."""
    renewal.revoke(fleet, "csd0")
    found = x509.load_pem_x509_crl(fleet.identity.revoked.read_bytes())
    authority = load(fleet)
    assert found.last_update_utc == datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert found.next_update_utc == authority.certificate.not_valid_after_utc
    assert found.is_signature_valid(authority.key.public_key())


def test_what_is_no_list_of_this_authority_is_named(fleet: Fleet, tmp_path: Path) -> None:
    other = provisioning.create(tmp_path / "other", "other", ("csd0",))
    renewal.revoke(other, "csd0")
    shutil.copy(other.identity.revoked, fleet.identity.revoked)
    with pytest.raises(LocalError, match=r"crl\.pem is not signed by the authority of this fleet"):
        renewal.revoke(fleet, "csd0")
    assert "unable to get certificate CRL" in refusal(fleet, "csd0")
    fleet.identity.revoked.write_text("nonsense\n")
    for action in (lambda: revocation.is_revoked(fleet, "csd0"), lambda: renewal.revoke(fleet, "csd0")):
        with pytest.raises(LocalError, match=r"crl\.pem: it is no list of revoked certificates$"):
            action()
    with pytest.raises(LocalError, match=r"crl\.pem: it is no list of revoked certificates$"):
        fleet.identity.context(server=False)


def test_two_commands_lose_no_entry(fleet: Fleet) -> None:
    with (
        locked(fleet.identity.revoked.with_name("crl.lock"), "busy"),
        pytest.raises(LocalError, match="another command revokes certificates of this fleet"),
    ):
        renewal.revoke(fleet, "csd0")
    assert not fleet.identity.revoked.exists()


def test_a_device_is_no_longer_taken_for_another_one_of_its_name(fleet: Fleet, tmp_path: Path) -> None:
    """Before: the certificate of a device that was removed was that of the next device of its name."""
    grown = provisioning.add(fleet, DeviceConfig("dev0", board="qemu-virt"))
    shutil.copytree(etc(grown, "dev0"), tmp_path / "removed")
    path = fleet.directory / "fleet.toml"
    path.write_text(re.sub(r'\[\[device\]\]\nname = "dev0"\n(?:[^\[\n].*\n|\n)*', "", path.read_text()))
    again = provisioning.add(directory.read(fleet.directory), DeviceConfig("dev0", board="qemu-virt"))
    assert refusal(again, "dev0") == ""
    assert "certificate revoked" in refusal(again, "dev0", tmp_path / "removed")


def test_a_removed_device_can_be_revoked_and_a_stranger_cannot(fleet: Fleet) -> None:
    provisioning.remove(fleet, provisioning.without(fleet, "csd0"), "csd0")
    assert renewal.revoke(directory.read(fleet.directory), "csd0") == 1
    with pytest.raises(LocalError, match="there is no certificate of a device 'csd9' in "):
        renewal.revoke(fleet, "csd9")


class Cut(Exception):
    """The power is cut."""


def renew_until(fleet: Fleet, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew csd0, and cut the power before the file ``cut`` is put in place."""
    replace, rename = Path.replace, Path.rename

    def stopping(move):  # type: ignore[no-untyped-def]
        def moved(self: Path, target: Path) -> Path:
            if str(target).endswith(cut):
                raise Cut
            return move(self, target)  # type: ignore[no-any-return]

        return moved

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stopping(replace))
        patch.setattr(Path, "rename", stopping(rename))
        with pytest.raises(Cut):
            certificate_renewal.renew(fleet, "csd0")


@pytest.mark.parametrize(
    "cut",
    [
        f"csd0/{name}"
        for name in (
            "renewal/old.pem",
            "renewal/key.pem",
            "renewal/cert.pem",
            "etc/key.pem.new",
            "etc/cert.pem",
            "etc/key.pem",
        )
    ]
    + ["host/crl.pem"],
)
def test_a_renewal_that_is_cut_leaves_a_device_that_is_taken(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    shutil.copytree(etc(fleet, "csd0"), tmp_path / "before")
    renew_until(fleet, cut, monkeypatch)
    assert refusal(fleet, "csd0") == "" == refusal(fleet, "csd0", tmp_path / "before")
    assert certificate_renewal.renew(fleet, "csd0") == "at its start"
    assert refusal(fleet, "csd0") == ""
    assert refusal(fleet, "csd0", tmp_path / "before") == REVOKED
    assert not (fleet.device_directory("csd0") / "renewal").exists()
    assert sorted(path.name for path in etc(fleet, "csd0").iterdir()) == sorted(
        path.name for path in (tmp_path / "before").iterdir()
    )
    modes = {path.name: path.stat().st_mode & 0o777 for path in etc(fleet, "csd0").glob("*.pem")}
    assert modes == {"ca.pem": 0o644, "cert.pem": 0o644, "key.pem": 0o600}


def test_a_renewed_certificate_has_another_key_and_the_same_name(fleet: Fleet) -> None:
    def found() -> x509.Certificate:
        return x509.load_pem_x509_certificate((etc(fleet, "csd0") / "cert.pem").read_bytes())

    before = found()
    certificate_renewal.renew(fleet, "csd0")
    assert found().subject == before.subject and found().serial_number != before.serial_number
    assert found().public_key() != before.public_key()


def test_a_revocation_takes_a_renewal_that_is_under_way_with_it(fleet: Fleet, tmp_path: Path) -> None:
    """The device may have the new certificate already, while the fleet's directory has the old one."""
    begun = Renewal(fleet, load(fleet), "csd0")
    assert renewal.revoke(fleet, "csd0") == 2
    shutil.copytree(begun.identity.certificate.parent, tmp_path / "delivered")
    shutil.copy(etc(fleet, "csd0") / "ca.pem", tmp_path / "delivered")
    assert refusal(fleet, "csd0") == REVOKED == refusal(fleet, "csd0", tmp_path / "delivered")
    again = Renewal(fleet, load(fleet), "csd0")
    assert again.serial != begun.serial


def test_a_revoked_device_gets_all_its_keys_anew(fleet: Fleet, tmp_path: Path) -> None:
    """A thief has the old ones, that of the SSH server among them; the owner's settings stay."""
    toml = etc(fleet, "csd0") / "agent.toml"
    toml.write_text(f"{toml.read_text()}\n[policy]\nleast_samples = 20\n")
    before = {path.name: path.read_bytes() for path in etc(fleet, "csd0").iterdir()}
    pinned = fleet.known_hosts.read_text().splitlines()
    shutil.copytree(etc(fleet, "csd0"), tmp_path / "stolen")
    renewal.revoke(fleet, "csd0")
    assert certificate_renewal.renew(fleet, "csd0") == "at its start"
    after = {path.name: path.read_bytes() for path in etc(fleet, "csd0").iterdir()}
    kept = {name for name in before if before[name] == after[name]}
    assert kept == {"agent.toml", "ca.pem", "authorized_keys", "authorized_keys_admin"}
    assert (refusal(fleet, "csd0"), refusal(fleet, "csd0", tmp_path / "stolen")) == ("", REVOKED)
    public = after["ssh_host_key.pub"].decode().split()[1]
    now = {line.split()[0]: line.split()[2] for line in fleet.known_hosts.read_text().splitlines()}
    assert now == {"csd0": public, "csd1": pinned[1].split()[2]}


def test_a_board_that_cannot_be_reached_keeps_its_certificate(fleet: Fleet) -> None:
    grown = provisioning.add(fleet, DeviceConfig("dev0", board="qemu-virt"))
    with pytest.raises(LocalError, match="no host daemon runs"):
        certificate_renewal.renew(grown, "dev0")
    assert refusal(grown, "dev0") == ""
    renewal.revoke(grown, "dev0")
    with pytest.raises(LocalError, match="dev0 is revoked: 'millpond renew dev0' makes another"):
        flash._identity(grown.directory, "dev0", "qemu-virt", "/dev/disk/by-id/volume", False)
    assert certificate_renewal.renew(grown, "dev0") == "to be flashed"
    assert flash._identity(grown.directory, "dev0", "qemu-virt", "/dev/disk/by-id/volume", False)


def deliver(board: Path, key: bytes, certificate: bytes, *, sent: bytes | None = None) -> int:
    """Have a shell do what a board's does."""
    line = certificate_renewal.script(str(board), len(key), len(certificate))
    data = key + certificate if sent is None else sent
    done = subprocess.run(["sh", "-c", line], input=data, capture_output=True, check=False)
    return done.returncode


def test_a_board_puts_its_new_certificate_in_place_whole_or_not_at_all(fleet: Fleet, tmp_path: Path) -> None:
    board = shutil.copytree(etc(fleet, "csd0"), tmp_path / "board")
    certificate, key = load(fleet).sign("csd0")
    for sent in (b"", key[:-1], key, (key + certificate)[:-1], key + certificate + b"\n"):
        assert deliver(board, key, certificate, sent=sent) == 65
        assert (board / "cert.pem").read_bytes() == (etc(fleet, "csd0") / "cert.pem").read_bytes()
        assert refusal(fleet, "csd0", board) == ""
    assert deliver(board, key, certificate) == 0
    assert ((board / "key.pem").read_bytes(), (board / "cert.pem").read_bytes()) == (key, certificate)
    modes = [(board / name).stat().st_mode & 0o777 for name in ("key.pem", "cert.pem")]
    assert modes == [0o600, 0o644] and not list(board.glob("*.new"))
    assert refusal(fleet, "csd0", board) == ""


def test_a_command_without_the_authoritys_key_says_which_file_it_misses(fleet: Fleet, tmp_path: Path) -> None:
    away = tmp_path / "away"
    fleet.ca.rename(away)
    for name in ("admin_key", "admin_key.pub"):
        (fleet.directory / "host" / name).rename(away / name)
    missing = rf"^{fleet.directory}/ca/ca\.key is missing: name the directory where it is kept by --authority"
    for action in (
        lambda: renewal.revoke(fleet, "csd0"),
        lambda: certificate_renewal.renew(fleet, "csd0"),
        lambda: provisioning.add(fleet, DeviceConfig("dev0", board="qemu-virt")),
    ):
        with pytest.raises(LocalError, match=missing):
            action()
    apart = directory.read(fleet.directory, away)
    assert provisioning.add(apart, DeviceConfig("dev0", board="qemu-virt")).authority == away
    assert renewal.revoke(directory.read(fleet.directory, away), "csd0") == 1
    assert (etc(fleet, "dev0") / "authorized_keys_admin").read_text() == apart.admin_key.with_suffix(
        ".pub"
    ).read_text()


def test_a_new_fleet_may_have_its_owners_keys_apart(tmp_path: Path) -> None:
    made = provisioning.create(tmp_path / "fleet", "farm", ("csd0",), keys=tmp_path / "owner")
    assert {path.name for path in (tmp_path / "owner").iterdir()} == {
        "ca.key",
        "ca.pem",
        "admin_key",
        "admin_key.pub",
    }
    assert not {"ca.key", "admin_key"} & {path.name for path in (tmp_path / "fleet").rglob("*")}
    assert refusal(made, "csd0") == ""
    with pytest.raises(LocalError, match="holds the authority of a fleet already"):
        provisioning.create(tmp_path / "second", "farm", (), keys=tmp_path / "owner")


def test_the_key_of_another_authority_signs_no_list(fleet: Fleet, tmp_path: Path) -> None:
    """With a list that another one has signed all devices would be refused."""
    other = provisioning.create(tmp_path / "other", "other", ())
    with pytest.raises(LocalError, match=rf"^{other.ca}/ca\.key is not the key of this fleet's authority$"):
        renewal.revoke(directory.read(fleet.directory, other.ca), "csd0")
    assert not fleet.identity.revoked.exists()
    (fleet.ca / "ca.key").write_text("nonsense")
    with pytest.raises(LocalError, match=r"ca\.key is no private key without a password"):
        renewal.revoke(fleet, "csd0")


NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
END = 365 * 10 * DAY


def refusal_of_host(fleet: Fleet) -> str:
    """Return why the agent of csd0 does not take the host, "" if it does."""
    server = Identity.in_directory(fleet.device_directory("csd0") / "etc")
    ours, theirs = handshake(fleet.identity, server, expect_server="csd0", expect_client="host")
    close(ours, theirs)
    return "" if isinstance(theirs, ssl.SSLSocket) else str(theirs)


def issue(
    fleet: Fleet, name: str, directory: Path, end: datetime.timedelta, patch: pytest.MonkeyPatch
) -> None:
    """Give ``name`` a certificate that ends so long from now."""
    with patch.context() as patched:
        patched.setattr(authority, "_YEARS", end / (365 * DAY))
        Authority.load(fleet.ca, fleet.identity.authority).issue(name, directory)


def test_a_host_whose_certificate_has_ended_is_renewed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: 'millpond renew host' knew no such device, and a new fleet had to be made."""
    issue(fleet, "host", fleet.directory / "host", -DAY, monkeypatch)
    context = CurrentContext(fleet.identity, server=False)
    before = context.get()
    assert "certificate has expired" in refusal_of_host(fleet)
    renewal.renew_host(fleet)
    assert refusal_of_host(fleet) == ""
    assert context.get() is not before  # a running daemon takes it
    assert (fleet.identity.key.stat().st_mode & 0o777, fleet.identity.certificate.stat().st_mode & 0o777) == (
        0o600,
        0o644,
    )


@pytest.mark.parametrize("cut", ["key.pem.new", "cert.pem", "key.pem"])
def test_a_renewal_of_the_host_that_is_cut_leaves_a_host_that_devices_take(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    replace = Path.replace

    def until(target: str) -> None:
        def moved(self: Path, place: Path) -> Path:
            if place.name == target:
                raise Cut
            return replace(self, place)

        with monkeypatch.context() as patch, pytest.raises(Cut):
            patch.setattr(Path, "replace", moved)
            renewal.renew_host(fleet)

    until(cut)
    assert refusal_of_host(fleet) == ""
    if cut == "key.pem":  # and again, in the middle of the next attempt
        monkeypatch.setattr(Authority, "sign", lambda *_: pytest.fail("not before the key is in place"))
        until("key.pem")
        monkeypatch.undo()
    assert refusal_of_host(fleet) == ""
    renewal.renew_host(fleet)
    assert refusal_of_host(fleet) == "" and not fleet.identity.next_key.exists()


def test_the_end_of_a_certificate_is_told_before(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings(fleet, NOW) == ()
    assert warnings(fleet, NOW + END - 31 * DAY) == ()
    issue(fleet, "host", fleet.directory / "host", 29 * DAY, monkeypatch)
    issue(fleet, "csd1", fleet.device_directory("csd1") / "etc", -DAY, monkeypatch)
    host, device = warnings(fleet, NOW)
    assert host.startswith("the certificate of host ends on 2") and host.endswith("'millpond renew host'")
    assert device.startswith("the certificate of csd1 ended on 2") and "'millpond renew csd1'" in device
    (all_of_them,) = warnings(fleet, NOW + END - 29 * DAY)
    assert all_of_them.startswith("the fleet's authority ends on 2") and "a new fleet" in all_of_them


@pytest.mark.expected_log("csd1 ended on")
def test_a_daemon_logs_it_once_a_day(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    issue(fleet, "csd1", fleet.device_directory("csd1") / "etc", -DAY, monkeypatch)
    told = ExpiryLog(fleet)
    with caplog.at_level(logging.WARNING, "millpond"):
        told.tell()
        told.tell()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "csd1 ended on" in lines[0]
