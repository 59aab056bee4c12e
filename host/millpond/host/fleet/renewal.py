# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the renewal of a certificate: made, put in place, and only then a device's old one revoked.

It is kept in the device's directory until it is over. One that was cut is gone on with: the device may have
the new certificate already.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from millpond.base.errors import LocalError
from millpond.host.fleet import revocation
from millpond.host.fleet.authority import Authority
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.revocation import RENEWAL
from millpond.linux.file_lock import locked
from millpond.linux.files import replace_durably, write_durably, write_secret
from millpond.wire.tls import HOST, Identity


class Renewal:
    """A new certificate for ``device``, with a new key, in ``identity``."""

    def __init__(self, fleet: Fleet, authority: Authority, device: str) -> None:
        """Make the certificate, or take up one that is not in place yet. Raises LocalError, OSError."""
        self._fleet, self._authority, self._device = fleet, authority, device
        self._own = Identity.in_directory(fleet.device_directory(device) / "etc")
        self._folder = fleet.device_directory(device) / RENEWAL
        self.identity = Identity.in_directory(self._folder)
        if not self._is_under_way():
            self._begin()
        serial = revocation.serial_of(self.identity.certificate)
        if serial is None:
            raise LocalError(f"{self.identity.certificate} is no certificate")
        self.serial = serial

    def _is_under_way(self) -> bool:
        serial = revocation.serial_of(self.identity.certificate)
        return serial is not None and not revocation.is_listed(self._fleet, serial)

    def _begin(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)
        write_secret(self._folder / "old.pem", self._own.certificate.read_bytes())
        certificate, key = self._authority.sign(self._device)
        write_secret(self.identity.key, key)
        write_secret(self.identity.certificate, certificate)  # last: with it the renewal is under way

    def install(self) -> None:
        """Put certificate and key in place in the fleet's directory. At no moment, also after a power cut,
        are they there without each other. Raises OSError.
        """
        if revocation.serial_of(self._own.certificate) != self.serial:
            write_secret(self._own.next_key, self.identity.key.read_bytes())
            write_secret(self._own.certificate, self.identity.certificate.read_bytes())
        self._own.certificate.chmod(0o644)
        if self._own.next_key.exists():
            replace_durably(self._own.next_key, self._own.key)

    def finish(self) -> None:
        """Revoke the old certificate, once the device has the new one. Raises LocalError, OSError."""
        old = revocation.known_serials(self._fleet, self._device)
        revocation.revoke(self._fleet, self._authority, [serial for serial in old if serial != self.serial])
        shutil.rmtree(self._folder)


def renew_host(fleet: Fleet) -> None:
    """Give the host itself a new certificate, with a new key, also where the old one has ended; a running
    daemon uses it for its next connections. Devices know no list of revoked certificates: the old one stays
    good until its end. After a cut the host has one of the two, and the same call goes on. Raises LocalError,
    OSError.
    """
    own, authority = fleet.identity, Authority.load(fleet.ca, fleet.identity.authority)
    with locked(own.key.with_name("renewal.lock"), "another command renews the certificate of the host"):
        if own.next_key.exists() and not _is_pair(own.certificate, own.key):
            replace_durably(own.next_key, own.key)
        certificate, key = authority.sign(HOST)
        write_secret(own.next_key, key)
        write_durably(own.certificate, certificate, 0o644)
        replace_durably(own.next_key, own.key)


def _is_pair(certificate: Path, key: Path) -> bool:
    known = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    return serialization.load_pem_private_key(key.read_bytes(), None).public_key() == known


def revoke(fleet: Fleet, device: str) -> int:
    """Revoke all certificates of a device, also of one that was removed, and return how many were good.
    Raises LocalError, OSError.
    """
    authority = Authority.load(fleet.ca, fleet.identity.authority)
    serials = set(revocation.known_serials(fleet, device))
    if not serials:
        folder = Path(fleet.device_directory(device), "etc")
        raise LocalError(f"there is no certificate of a device '{device}' in {folder}")
    good = [serial for serial in serials if not revocation.is_listed(fleet, serial)]
    revocation.revoke(fleet, authority, good)
    return len(good)
