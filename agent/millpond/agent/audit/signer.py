# SPDX-License-Identifier: Apache-2.0
"""Edge (files, ssh-keygen): signatures by the key of the device's certificate."""

from __future__ import annotations

import base64
import ssl

from millpond.base.errors import LocalError
from millpond.linux import ssh_signatures
from millpond.wire.tls import Identity

_TRIES = 3


class DeviceSigner:
    """Signs with the key of the certificate that ``identity`` has at the time."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def certificate(self) -> str:
        """Return the certificate, DER in base64. Raises LocalError."""
        try:
            text = self._identity.certificate.read_text()
            return base64.b64encode(ssl.PEM_cert_to_DER_cert(text)).decode()
        except (OSError, ValueError) as error:
            raise LocalError(f"{self._identity.certificate}: it cannot be read: {error}") from None

    def sign(self, namespace: str, text: str) -> tuple[str, str]:
        """Return a signature, and the certificate whose key has made it. Raises LocalError."""
        for _ in range(_TRIES):  # a renewal may put the next key in place meanwhile
            stamps, certificate = self._identity.stamps(), self.certificate()
            try:
                signature = ssh_signatures.sign_by_pem(self._identity.paired_key(), namespace, text)
            except OSError as error:
                raise LocalError(f"nothing can be signed: {error}") from None
            if stamps == self._identity.stamps():
                return signature, certificate
        raise LocalError("the device's certificate changes all the time")
