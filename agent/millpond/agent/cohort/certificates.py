# SPDX-License-Identifier: Apache-2.0
"""Edge (files): certificates of lasting keys of a cohort: the key of a device's certificate signs them.

A device that has pinned no cohort masks for those alone whose certificates the fleet's authority has issued:
a host without the authority's key cannot make devices up.
"""

from __future__ import annotations

import logging

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from millpond.agent.policy.rules import refused
from millpond.aggregate.masking import keys
from millpond.aggregate.masking.messages import KeyCertificate, OpenCohort
from millpond.base.errors import LocalError
from millpond.wire.tls import HOST, Identity, Stamp

log = logging.getLogger(__name__)

_ALGORITHM = ec.ECDSA(hashes.SHA256())
_ENCODING = serialization.Encoding.DER


class KeyCertificates:
    """Certifies the key of the device with an ``identity``, and checks the certificates of others' keys."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._stamps: tuple[Stamp, ...] = ()
        self._known = set[tuple[str, bytes, KeyCertificate]]()

    def own(self, name: str, public: bytes) -> KeyCertificate:
        """Return the certificate of the device's own lasting key, an empty one if it has none: others that
        have pinned it do not need that.
        """
        try:
            certificate = x509.load_pem_x509_certificate(self._identity.certificate.read_bytes())
            signature = self._key().sign(_text(name, public), _ALGORITHM)
        except (LocalError, OSError, ValueError) as error:
            log.warning("the key of %s in cohorts cannot be certified: %s", name, error)
            return KeyCertificate()
        return KeyCertificate(certificate.public_bytes(_ENCODING), signature)

    def _key(self) -> ec.EllipticCurvePrivateKey:
        """Return the key of the certificate. Raises LocalError, OSError, ValueError."""
        found = serialization.load_pem_private_key(self._identity.paired_key().read_bytes(), None)
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{self._identity.key.name} is no key of an elliptic curve")
        return found

    def check(self, request: OpenCohort) -> None:
        """Raise Refused for members whose keys are certified by no device of this name in the fleet."""
        stamps = self._identity.stamps()
        if stamps != self._stamps:
            self._stamps = stamps
            self._known.clear()  # the authority may be another
        for name, public in request.members.items():
            shown = request.certificates.get(name, KeyCertificate())
            if (name, public, shown) not in self._known:
                self._check_one(name, public, shown)
                self._known.add((name, public, shown))

    def _check_one(self, name: str, public: bytes, shown: KeyCertificate) -> None:
        if name == HOST:  # which has a certificate of the fleet, too
            raise refused("cohort", "the host is no device of a cohort")
        try:
            authority = x509.load_pem_x509_certificate(self._identity.authority.read_bytes())
            found = x509.load_der_x509_certificate(shown.certificate)
            found.verify_directly_issued_by(authority)
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            key = found.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError
            key.verify(shown.signature, _text(name, public), _ALGORITHM)
        except OSError as error:
            raise refused("cohort", f"keys of others cannot be checked: {error}") from None
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            raise refused("cohort", f"the key of '{name}' is certified by no device of this fleet") from None
        if names.get_values_for_type(x509.DNSName) != [name]:
            raise refused("cohort", f"the key of '{name}' has the certificate of another device")


def _text(name: str, public: bytes) -> bytes:
    return keys.digest("millpond cohort key", name, public)
