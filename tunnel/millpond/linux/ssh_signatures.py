# SPDX-License-Identifier: Apache-2.0
"""Edge (ssh-keygen): signatures by SSH keys, and by keys of certificates, see PROTOCOL.sshsig of OpenSSH."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from millpond.base.errors import LocalError

SECONDS = 10.0
_WHO = "signer"
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"


def sign(key: Path, namespace: str, text: str) -> str:
    """Return the signature of a text by the private key in a file, for which ssh-keygen may ask the user for
    a passphrase. Raises LocalError.
    """
    return _run(["-q", "-Y", "sign", "-f", str(key), "-n", namespace], text, f"{key}: ", None)


def sign_by_pem(key: Path, namespace: str, text: str) -> str:
    """Return the signature, in one line, of a text by a private key that is PEM, as those of certificates
    are: beside it ssh-keygen wants the public key in a file. Raises LocalError, OSError.
    """
    with tempfile.TemporaryDirectory(prefix="millpond-") as name:
        link = Path(name, "key")
        link.symlink_to(key.absolute())
        link.with_name("key.pub").write_text(_run(["-y", "-f", str(link)], "", f"{key}: "))
        signature = _run(["-q", "-Y", "sign", "-f", str(link), "-n", namespace], text, f"{key}: ")
    return "".join(signature.strip().removeprefix(_BEGIN).removesuffix(_END).split())


def verify(keys: Sequence[str], namespace: str, text: str, signature: str) -> str:
    """Return the fingerprint of that of the public ``keys``, as OpenSSH writes them, which has signed a text,
    "" if none has. The ``signature`` is a file's contents, or in one line. Raises LocalError.
    """
    if not signature.startswith(_BEGIN):
        signature = f"{_BEGIN}\n{signature}\n{_END}\n"
    with tempfile.TemporaryDirectory(prefix="millpond-") as name:
        signers, signed = Path(name, "signers"), Path(name, "signature")
        signers.write_text("".join(f'{_WHO} namespaces="{namespace}" {key}\n' for key in keys))
        signed.write_text(signature)
        arguments = ["-Y", "verify", "-f", str(signers), "-I", _WHO, "-n", namespace, "-s", str(signed)]
        found = _keygen(arguments, text)
    if found.returncode:
        return ""
    told = re.search(r"SHA256:[A-Za-z0-9+/]+", found.stdout.decode(errors="replace"))
    return told[0] if told else "unnamed"


def _run(arguments: Sequence[str], text: str, where: str, seconds: float | None = SECONDS) -> str:
    found = _keygen(arguments, text, seconds)
    if found.returncode:
        told = found.stderr.decode(errors="replace").strip().splitlines() or ["ssh-keygen failed"]
        raise LocalError(f"{where}{told[-1]}")
    return found.stdout.decode()


def _keygen(
    arguments: Sequence[str], text: str, seconds: float | None = SECONDS
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["ssh-keygen", *arguments],  # noqa: S607
            input=text.encode(),
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalError(f"ssh-keygen cannot be run: {error}") from None
