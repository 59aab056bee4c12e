# SPDX-License-Identifier: Apache-2.0
"""Edge (ssh-keygen): signatures of a job's code by the keys of a device's owner."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from millpond.agent.policy.rules import refused
from millpond.train.job.signed_code import NAMESPACE, digest
from millpond.train.protocol import PrepareWorker

_SECONDS = 10.0


def check_signature(owners: Sequence[str], request: PrepareWorker) -> None:
    """Raise Refused unless one of ``owners``, public keys as OpenSSH writes them, has signed the code."""
    check_digest(owners, digest(request.work, request.files), request.signature)


def check_digest(owners: Sequence[str], text: str, signature: str) -> None:
    """Raise Refused unless ``signature`` is one of ``owners`` of the digest ``text``."""
    if not signature:
        raise refused("code", f"the code is not signed; its digest is {text}")
    with tempfile.TemporaryDirectory(prefix="millpond-") as name:
        signers, signed = Path(name, "signers"), Path(name, "signature")
        signers.write_text("".join(f'owner namespaces="{NAMESPACE}" {key}\n' for key in owners))
        signed.write_text(signature)
        command = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "owner", "-n", NAMESPACE]
        try:
            found = subprocess.run(
                [*command, "-s", str(signed)],
                input=text.encode(),
                capture_output=True,
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise refused("code", f"the device cannot run ssh-keygen: {error}") from None
    if found.returncode:
        raise refused("code", f"no owner of the device has signed the code; its digest is {text}")
