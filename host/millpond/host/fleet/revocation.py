# SPDX-License-Identifier: Apache-2.0
"""Edge (files, cryptography): the list of the certificates that a fleet has revoked.

It is a CRL (RFC 5280), ``host/crl.pem``, signed by the fleet's authority. It is valid as long as the
authority is, and from the begin of all certificates on: no clock makes it invalid, and with it a whole fleet.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from millpond.base.errors import LocalError
from millpond.host.fleet.authority import BEGIN, Authority
from millpond.host.fleet.directory import Fleet, FleetConfig
from millpond.linux.file_lock import locked
from millpond.linux.files import write_secret
from millpond.wire.tls import Stamp, stamp

RENEWAL = "renewal"
"""The directory of a device's new certificate and key, and of the certificate that they replace."""

_MOST = 1024
"""Files whose contents are kept in memory: one for each device, and the list."""


def is_revoked(fleet: Fleet, device: str) -> bool:
    """Return whether the certificate that the fleet has for a device is revoked. Raises LocalError for a list
    that cannot be read.
    """
    known = serial_of(_certificate(fleet.directory, device))
    return known is not None and is_listed(fleet, known)


def is_listed(fleet: Fleet, serial: int) -> bool:
    """Return whether a certificate is on the fleet's list. Raises LocalError for one that cannot be read."""
    path = fleet.identity.revoked
    return serial in _listed(path, stamp(path))


def serial_of(certificate: Path) -> int | None:
    """Return the serial number of a certificate; None where there is none."""
    return _serial(certificate, stamp(certificate))


def known_serials(fleet: Fleet, device: str) -> list[int]:
    """Return the serial numbers of a device's certificates: the present one, and those of a renewal that is
    under way.
    """
    own = fleet.device_directory(device)
    files = [own / "etc" / "cert.pem", *(own / RENEWAL / name for name in ("cert.pem", "old.pem"))]
    return [serial for path in files if (serial := serial_of(path)) is not None]


def revoke(fleet: Fleet, authority: Authority, serials: Iterable[int]) -> None:
    """Put certificates on the fleet's list, which is on the disk then. Raises LocalError, OSError."""
    path, now = fleet.identity.revoked, datetime.datetime.now(datetime.UTC)
    with locked(path.with_name("crl.lock"), "another command revokes certificates of this fleet"):
        before = {one.serial_number: one.revocation_date_utc for one in _entries(path, authority)}
        wanted = dict.fromkeys(serials, now) | before
        if wanted != before:
            write_secret(path, _signed(authority, wanted, len(before)))


def _signed(authority: Authority, dates: dict[int, datetime.datetime], number: int) -> bytes:
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.certificate.subject)
        .last_update(BEGIN)
        .next_update(authority.certificate.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False
        )
    )
    for serial, date in dates.items():
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(date).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _entries(path: Path, authority: Authority) -> list[x509.RevokedCertificate]:
    """Return what is on the list; an authority adds to none that another has signed. Raises LocalError."""
    found = _read(path)
    if found is None:
        return []
    if not found.is_signature_valid(authority.key.public_key()):
        raise LocalError(f"{path} is not signed by the authority of this fleet")
    return list(found)


def _read(path: Path) -> x509.CertificateRevocationList | None:
    try:
        return x509.load_pem_x509_crl(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no list of revoked certificates"
        raise LocalError(f"{path}: {why}") from None


@functools.lru_cache(maxsize=_MOST)
def _certificate(fleet: Path, device: str) -> Path:
    return Fleet(fleet, FleetConfig("")).device_directory(device) / "etc" / "cert.pem"


@functools.lru_cache(maxsize=_MOST)
def _listed(path: Path, _stamp: Stamp) -> frozenset[int]:
    return frozenset(one.serial_number for one in _read(path) or ())


@functools.lru_cache(maxsize=_MOST)
def _serial(path: Path, _stamp: Stamp) -> int | None:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).serial_number
    except (OSError, ValueError):
        return None
