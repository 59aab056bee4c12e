# SPDX-License-Identifier: Apache-2.0
"""Edge (cryptography, ssh-keygen, files): verifies the signatures of an audit log, and that nothing of what
this host has seen before is gone.

The host keeps the head that it has verified last: the first one is taken on trust.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
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


def verify(fleet: Fleet, copy: AuditLogCopy, *, anew: bool = False) -> AuditVerdict:
    """Verify a log whose chain is whole, and keep its head; ``anew`` forgets the one that was kept. Raises
    RemoteError for a log that is not what it says, LocalError.
    """
    device = copy.device
    if not copy.entries:
        raise RemoteError(f"{device}: its audit log is empty")
    certificate, signatures = _check_signatures(fleet, copy)
    path = fleet.device_directory(device) / "audit-head.json"
    kept = None if anew else _kept(path)
    if fault := append_fault(kept, copy.head.oldest, copy.digests, copy.end):
        raise RemoteError(f"{device}: the audit log: {fault}; if the device has been set up anew, add --anew")
    write_durably(path, json.dumps(dump(KeptHead(copy.end.number, copy.end.digest, time.time()))).encode())
    shown = certificate.fingerprint(hashes.SHA256()).hex()
    return AuditVerdict(len(copy.entries), copy.end.number, copy.end.digest, shown, signatures, kept)


def _check_signatures(fleet: Fleet, copy: AuditLogCopy) -> tuple[x509.Certificate, int]:
    """Verify the signature of the head, and the last one by each certificate that the device had before: it
    covers all entries up to there. Returns the present certificate, and the number of signatures.
    """
    device = copy.device
    if not copy.head.signature:
        raise RemoteError(f"{device}: the audit log is not signed: {copy.head.reason or 'it says not why'}")
    *before, (encoded, _) = [*_last_signatures(copy)] or [("", None)]
    certificate = _certificate(fleet, device, encoded)
    if certificate != _pinned(fleet, device):
        raise RemoteError(
            f"{device}: the certificate in the audit log is not the one that the fleet has for it"
        )
    if revocation.is_listed(fleet, certificate.serial_number):
        raise RemoteError(f"{device}: the certificate in the audit log is revoked")
    _check(device, certificate, copy.end, copy.head.signature)
    count = 1
    for encoded, signed in before:
        earlier = _certificate(fleet, device, encoded)
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


def _certificate(fleet: Fleet, device: str, encoded: str) -> x509.Certificate:
    """Return a certificate of a log, which the authority has issued to the device. Raises RemoteError."""
    authority = x509.load_pem_x509_certificate(fleet.identity.authority.read_bytes())
    try:
        found = x509.load_der_x509_certificate(base64.b64decode(encoded))
        found.verify_directly_issued_by(authority)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        raise RemoteError(f"{device}: the audit log has a certificate that is none of this fleet") from None
    if names.get_values_for_type(x509.DNSName) != [device]:
        raise RemoteError(f"{device}: the audit log has the certificate of another device")
    return found


def _pinned(fleet: Fleet, device: str) -> x509.Certificate:
    path = fleet.device_directory(device) / "etc" / "cert.pem"
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        raise LocalError(f"{path} is no certificate") from None


def _check(device: str, certificate: x509.Certificate, head: LogHead, signature: str) -> None:
    key = certificate.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    if not ssh_signatures.verify([key.decode()], NAMESPACE, checkpoint(device, head), signature):
        raise RemoteError(f"{device}: the signature of entry {head.number} of the audit log is not valid")


def _kept(path: Path) -> KeptHead | None:
    try:
        return load(KeptHead, json.loads(path.read_bytes()), path.name)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as error:
        raise LocalError(f"{path} cannot be read: {error}") from None
