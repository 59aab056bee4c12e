# SPDX-License-Identifier: Apache-2.0
"""The end of certificates: it is told before, and the host's own are renewed, also after it."""

from __future__ import annotations

import datetime
import logging
import ssl
from pathlib import Path

import pytest

from millpond.host.fleet import authority, provisioning, renewal
from millpond.host.fleet.authority import Authority
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.expiry import ExpiryLog, warnings
from millpond.wire.tls import CurrentContext, Identity

from ..wire.test_tls import close, handshake

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
END = 365 * 10 * DAY


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return provisioning.create(tmp_path / "fleet", "farm", ("csd0", "csd1"))


def refusal(fleet: Fleet) -> str:
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
    assert "certificate has expired" in refusal(fleet)
    renewal.renew_host(fleet)
    assert refusal(fleet) == ""
    assert context.get() is not before  # a running daemon takes it
    assert (fleet.identity.key.stat().st_mode & 0o777, fleet.identity.certificate.stat().st_mode & 0o777) == (
        0o600,
        0o644,
    )


class Cut(Exception):
    """The power is cut."""


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
    assert refusal(fleet) == ""
    if cut == "key.pem":  # and again, in the middle of the next attempt
        monkeypatch.setattr(Authority, "sign", lambda *_: pytest.fail("not before the key is in place"))
        until("key.pem")
        monkeypatch.undo()
    assert refusal(fleet) == ""
    renewal.renew_host(fleet)
    assert refusal(fleet) == "" and not fleet.identity.next_key.exists()


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
