# SPDX-License-Identifier: Apache-2.0
"""Edge (ssh-keygen): signatures of a job's code by the keys of a device's owner."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.agent.policy.rules import refused
from millpond.base.errors import LocalError
from millpond.linux import ssh_signatures
from millpond.train.job.signed_code import NAMESPACE, digest
from millpond.train.protocol import PrepareWorker


def check_signature(owners: Sequence[str], request: PrepareWorker) -> str:
    """Return the fingerprint of the owner's key that has signed a job's code. Raises Refused if none has."""
    return check_digest(owners, digest(request.work, request.files), request.signature)


def check_digest(owners: Sequence[str], text: str, signature: str) -> str:
    """Return the fingerprint of that of ``owners``, public keys as OpenSSH writes them, which has signed the
    digest ``text`` of a code. Raises Refused if none has.
    """
    if not signature:
        raise refused("code", f"the code is not signed; its digest is {text}")
    try:
        found = ssh_signatures.verify(owners, NAMESPACE, text, signature)
    except LocalError as error:
        raise refused("code", f"the device cannot check signatures: {error}") from None
    if not found:
        raise refused("code", f"no owner of the device has signed the code; its digest is {text}")
    return found
