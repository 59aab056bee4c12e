# SPDX-License-Identifier: Apache-2.0
"""Edge (cryptography, ssh-keygen, files): verifies the signatures of an audit log, and that nothing of what
this host has seen before is gone.

The host keeps the head that it has verified last: the first one is taken on trust. A saved copy is verified
by the certificate of the fleet's authority alone.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization

from millpond.base.errors import ConfigError, LocalError, RemoteError
from millpond.base.schema import dump, load
from millpond.host.fleet import revocation
from millpond.host.fleet.directory import Fleet
from millpond.host.records.audit import AuditVerdict, KeptHead, append_fault
from millpond.host.remote.audit.reading import AuditLogCopy
from millpond.linux import ssh_signatures
from millpond.linux.files import write_durably
from millpond.wire.audit_log import NAMESPACE, InForce, LogHead, Signed, checkpoint


@dataclass(frozen=True, slots=True)
class _Trust:
    """The ``authority`` of a fleet, and what ``refuses`` a certificate of it: returns why, or ""."""

    authority: x509.Certificate
    refuses: Callable[[x509.Certificate], str]


def verify(fleet: Fleet, copy: AuditLogCopy, *, anew: bool = False) -> AuditVerdict:
    """Verify a log whose chain is whole, and keep its head; ``anew`` forgets the one that was kept. Raises
    RemoteError for a log that is not what it says, LocalError.
    """
    device = copy.device
    trust = _Trust(_loaded(fleet.identity.authority), lambda found: _refused(fleet, device, found))
    certificate, signatures = _check_signatures(trust, copy)
    path = fleet.device_directory(device) / "audit-head.json"
    kept = None if anew else _kept(path)
    if fault := append_fault(kept, copy.head.oldest, copy.digests, copy.end):
        raise RemoteError(f"{device}: the audit log: {fault}; if the device has been set up anew, add --anew")
    write_durably(path, json.dumps(dump(KeptHead(copy.end.number, copy.end.digest, time.time()))).encode())
    return _verdict(copy, certificate, signatures, kept)


def verify_saved(authority: Path, copy: AuditLogCopy, saved: float, nonce: str = "") -> AuditVerdict:
    """Verify a log that was ``saved`` at that time, by the certificate of the fleet's authority, in a file,
    without the fleet; with a ``nonce`` also that the device has signed it. Raises RemoteError for a log that
    is not what it says, LocalError.
    """
    if nonce and nonce != copy.nonce:
        raise RemoteError(f"{copy.device}: the audit log was signed with another nonce: it may be an old one")
    found = _check_signatures(_Trust(_loaded(authority), lambda _found: ""), copy)
    return _verdict(copy, *found, None, saved)


def _verdict(
    copy: AuditLogCopy,
    certificate: x509.Certificate,
    signatures: int,
    kept: KeptHead | None,
    saved: float | None = None,
) -> AuditVerdict:
    shown = certificate.fingerprint(hashes.SHA256()).hex()
    end = copy.end
    return AuditVerdict(len(copy.entries), end.number, end.digest, shown, signatures, kept, copy.nonce, saved)


def _refused(fleet: Fleet, device: str, found: x509.Certificate) -> str:
    """Return why the present certificate of a log is not the one of the fleet's device, "" if it is."""
    if found != _pinned(fleet, device):
        return "not the one that the fleet has for it"
    return "revoked" if revocation.is_listed(fleet, found.serial_number) else ""


def _check_signatures(trust: _Trust, copy: AuditLogCopy) -> tuple[x509.Certificate, int]:
    """Verify the signature of the head, and the last one by each certificate that the device had before: it
    covers all entries up to there. Returns the present certificate, and the number of signatures.
    """
    device = copy.device
    if not copy.entries:
        raise RemoteError(f"{device}: its audit log is empty")
    if not copy.head.signature:
        raise RemoteError(f"{device}: the audit log is not signed: {copy.head.reason or 'it says not why'}")
    *before, (encoded, _) = [*_last_signatures(copy)] or [("", None)]
    certificate = _certificate(trust, device, encoded)
    if why := trust.refuses(certificate):
        raise RemoteError(f"{device}: the certificate in the audit log is {why}")
    _check(device, certificate, copy.end, copy.head.signature, copy.nonce, copy.head.oldest)
    count = 1
    for encoded, signed in before:
        earlier = _certificate(trust, device, encoded)
        if signed is None:
            continue
        head = LogHead(signed.number, signed.digest)
        if signed.number >= copy.head.oldest and copy.digests.get(signed.number) != signed.digest:
            raise RemoteError(
                f"{device}: entry {signed.number} of the audit log is not the one that was signed"
            )
        _check(device, earlier, head, signed.signature)
        count += 1
    return certificate, count


def _last_signatures(copy: AuditLogCopy) -> Iterator[tuple[str, Signed | None]]:
    """Yield each certificate of a log in turn, with the last signature while it was in force."""
    certificate, signed = "", None
    for entry in copy.entries:
        if isinstance(entry.event, Signed):
            signed = entry.event
        elif isinstance(entry.event, InForce) and entry.event.certificate != certificate:
            if certificate:
                yield certificate, signed
            certificate, signed = entry.event.certificate, None
    if certificate:
        yield certificate, signed


def _certificate(trust: _Trust, device: str, encoded: str) -> x509.Certificate:
    """Return a certificate of a log, which the authority has issued to the device. Raises RemoteError."""
    try:
        found = x509.load_der_x509_certificate(base64.b64decode(encoded))
        found.verify_directly_issued_by(trust.authority)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        raise RemoteError(f"{device}: the audit log has a certificate that is none of this fleet") from None
    if names.get_values_for_type(x509.DNSName) != [device]:
        raise RemoteError(f"{device}: the audit log has the certificate of another device")
    return found


def _pinned(fleet: Fleet, device: str) -> x509.Certificate:
    return _loaded(fleet.device_directory(device) / "etc" / "cert.pem")


def _loaded(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        raise LocalError(f"{path} is no certificate") from None


def _check(
    device: str,
    certificate: x509.Certificate,
    head: LogHead,
    signature: str,
    nonce: str = "",
    oldest: int = 0,
) -> None:
    key = certificate.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    if not ssh_signatures.verify(
        [key.decode()], NAMESPACE, checkpoint(device, head, nonce, oldest), signature
    ):
        raise RemoteError(f"{device}: the signature of entry {head.number} of the audit log is not valid")


def _kept(path: Path) -> KeptHead | None:
    try:
        return load(KeptHead, json.loads(path.read_bytes()), path.name)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as error:
        raise LocalError(f"{path} cannot be read: {error}") from None
