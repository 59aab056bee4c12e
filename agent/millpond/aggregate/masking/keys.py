# SPDX-License-Identifier: Apache-2.0
"""Pure: the keys of members of a cohort, and what they make of them: seeds of masks, sealed shares, and
signatures.

X25519 (RFC 7748) gives two members a secret that nobody else has, HKDF-SHA-256 (RFC 5869) a key for each use
of it. What is sealed, by ChaCha20-Poly1305 (RFC 8439), is for the other member alone; what is signed, by
Ed25519 (RFC 8032), can be shown to others, too.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from millpond.aggregate.masking.messages import KEY_BYTES, LASTING_BYTES

_NONCE_BYTES = 12


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask to be subtracted, or else added. Its ``seed`` of 32 bytes is used for one mask alone."""

    seed: bytes
    subtract: bool = False


def public_of(secret: bytes) -> bytes:
    """Return the public key of a secret one of KEY_BYTES."""
    return private(secret).public_key().public_bytes_raw()


def private(secret: bytes) -> X25519PrivateKey:
    """Return the key of a secret one of KEY_BYTES, which takes as long as a secret in common."""
    return X25519PrivateKey.from_private_bytes(secret)


def in_common(own: X25519PrivateKey, public: bytes) -> bytes:
    """Return the secret of two members, by the key of either. Raises ValueError for what is no public key."""
    return own.exchange(X25519PublicKey.from_public_bytes(public))


def derived(secret: bytes, use: str, *about: bytes | str) -> bytes:
    """Return the key for one ``use``, ``about`` what it names, of two members with a ``secret`` in common."""
    drawn = hmac.digest(bytes(KEY_BYTES), secret, "sha256")
    return hmac.digest(drawn, digest(f"millpond {use}", *about) + b"\x01", "sha256")


class LastingKey:
    """The lasting key of a member, by a ``secret`` of KEY_BYTES: ``agreement`` is for secrets in common with
    others. ``public`` has LASTING_BYTES: the public keys of both its parts.
    """

    def __init__(self, secret: bytes) -> None:
        self.agreement = private(derived(secret, "agreement"))
        self._signing = Ed25519PrivateKey.from_private_bytes(derived(secret, "signing"))
        signer = self._signing.public_key().public_bytes_raw()
        self.public = self.agreement.public_key().public_bytes_raw() + signer

    def sign(self, about: bytes) -> bytes:
        """Return the signature of what is said."""
        return self._signing.sign(about)


def is_signed(lasting: bytes, about: bytes, signature: bytes) -> bool:
    """Return whether the member with this ``lasting`` public key has signed what is said."""
    try:
        Ed25519PublicKey.from_public_bytes(lasting[KEY_BYTES:]).verify(signature, about)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_lasting(key: bytes) -> bool:
    """Return whether a key is the public one of a member."""
    return len(key) == LASTING_BYTES and is_public(key[:KEY_BYTES])


def is_public(key: bytes) -> bool:
    """Return whether a key is a public one, with which secrets can be shared."""
    try:
        in_common(private(bytes(range(KEY_BYTES))), key)
    except ValueError:
        return False
    return True


def digest(*parts: bytes | str) -> bytes:
    """Return the SHA-256 of parts, each with its length before it."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8) + data)
    return found.digest()


def seal(key: bytes, nonce: bytes, data: bytes, about: bytes) -> bytes:
    """Return the sealed ``data``, bound to what it is ``about``, with a nonce of 12 bytes that is new."""
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, data, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """Return what was sealed, None if that was by another key, or about something else."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], about)
    except (InvalidTag, ValueError):
        return None
