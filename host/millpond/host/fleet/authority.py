# SPDX-License-Identifier: Apache-2.0
"""Edge (cryptography): the fleet's own certificate authority and SSH keys. Private files are 0600."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from millpond.base.errors import LocalError
from millpond.linux.files import write_durably, write_secret
from millpond.wire.tls import Identity

_YEARS = 10
BEGIN = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
"""The begin of all certificates, and of lists of revoked ones: where the clock of a board without a battery
may stand.
"""
PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


@dataclass(frozen=True, slots=True)
class Authority:
    """The certificate authority of one fleet."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @staticmethod
    def make(name: str) -> Authority:
        """Make an authority that is kept nowhere."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            _builder(subject, subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return Authority(certificate, key)

    @staticmethod
    def create(directory: Path, fleet: str) -> Authority:
        """Make an authority and keep it in ``directory`` as ``ca.pem`` and ``ca.key``."""
        made = Authority.make(f"millpond fleet {fleet}")
        write_private(directory / "ca.key", _private_pem(made.key))
        write_public(directory / "ca.pem", made.pem)
        return made

    @staticmethod
    def load(directory: Path, certificate: Path) -> Authority:
        """Return the authority of the file ``certificate``, whose key is in ``directory``. Raises LocalError,
        OSError.
        """
        path, known = directory / "ca.key", x509.load_pem_x509_certificate(certificate.read_bytes())
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except FileNotFoundError:
            raise missing(path) from None
        except (ValueError, TypeError):
            raise LocalError(f"{path} is no private key without a password") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != known.public_key():
            raise LocalError(f"{path} is not the key of this fleet's authority")
        return Authority(known, key)

    @property
    def pem(self) -> bytes:
        """The authority's certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def sign(self, name: str) -> tuple[bytes, bytes]:
        """Return a certificate for ``name`` (``host`` or a device), and its new key, as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(subject, self.certificate.subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
            .sign(self.key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM), _private_pem(key)

    def issue(self, name: str, directory: Path) -> Identity:
        """Write a certificate for ``name`` (``host`` or a device), its key and the authority's certificate to
        ``directory``.
        """
        certificate, key = self.sign(name)
        identity = Identity.in_directory(directory)
        write_private(identity.key, key)
        write_public(identity.certificate, certificate)
        write_public(identity.authority, self.pem)
        return identity


def missing(path: Path) -> LocalError:
    """Return the error of a command that needs a key which the daemon does not need."""
    return LocalError(f"{path} is missing: name the directory where it is kept by --authority DIR")


def signer(authority: Authority, directory: Path) -> tuple[Path, Path]:
    """Return certificate and key that sign updates, in ``directory``; make them if they do not exist."""
    certificate, key = directory / "update.pem", directory / "update.key"
    if not (certificate.exists() and key.exists()):
        own = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "update")])
        signed = (
            _builder(subject, authority.certificate.subject, own.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False
            )
            .sign(authority.key, hashes.SHA256())
        )
        write_private(key, _private_pem(own))
        write_public(certificate, signed.public_bytes(serialization.Encoding.PEM))
    return certificate, key


def create_ssh_key(path: Path, comment: str) -> str:
    """Make an ed25519 key at ``path`` and return the public key's line."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    write_private(path, private)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    line = f"{public.decode()} {comment}"
    write_public(path.with_suffix(".pub"), f"{line}\n".encode())
    return line


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, from its creation on, whole and on disk or not there."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_secret(path, data)


def write_public(path: Path, data: bytes) -> None:
    """Write a file that everybody may read. It is whole and on disk, or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, data, 0o644)


def _private_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGIN)
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
