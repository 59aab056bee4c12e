# SPDX-License-Identifier: Apache-2.0
"""Edge (osslsigncode): an EFI program's signature, which firmware under UEFI Secure Boot asks for.

The signature is Authenticode's, as section 32.2.3 of the UEFI specification 2.10 has it. It covers the whole
program: stub, kernel, initial file system, and the command line, in which the root's hash is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.build.run import run


@dataclass(frozen=True, slots=True)
class SigningKey:
    """Files in PEM: a private key without a passphrase, and its certificate, in the firmware's db."""

    key: Path
    certificate: Path


def signing_key(key: Path | None, certificate: Path | None) -> SigningKey | None:
    """Return the pair; None without both. Raises LocalError for one alone, or a file that is missing."""
    if key is None and certificate is None:
        return None
    if key is None or certificate is None:
        raise LocalError("--secure-boot-key and --secure-boot-certificate go together")
    for path in (key, certificate):
        if not path.is_file():
            raise LocalError(f"there is no file {path}")
    return SigningKey(key.absolute(), certificate.absolute())


def sign(program: Path, signer: SigningKey, time: int) -> None:
    """Sign ``program`` in its place, with ``time`` in seconds since 1970 as the time of the signature, so
    that the same program gets the same bytes. Raises LocalError.
    """
    signed = program.with_suffix(".signed")
    pair = ("-certs", signer.certificate, "-key", signer.key)
    run("osslsigncode", "sign", *pair, "-h", "sha256", "-time", str(time), "-in", program, "-out", signed)
    run("osslsigncode", "verify", "-CAfile", signer.certificate, "-in", signed, hint="is it the key's own?")
    signed.replace(program)
