# SPDX-License-Identifier: Apache-2.0
"""Edge (a file): the lasting key of a device in cohorts: made on the device, it never leaves it.

The public key lies beside it, in ``cohort.pub``, as ``policy.cohort`` of other devices pins it. It is no key
of the fleet's authority, by which a host could make devices up.
"""

from __future__ import annotations

import base64
import logging
import os
from pathlib import Path

from millpond.aggregate.masking.messages import KEY_BYTES
from millpond.linux.files import write_secret

log = logging.getLogger(__name__)

FILE, PUBLIC = "cohort.key", "cohort.pub"


def secret_key(state: Path, device: str) -> bytes:
    """Return the secret key in the directory of the agent's ``state``, made by the first call. Raises
    OSError.
    """
    from millpond.aggregate.masking import keys  # imports cryptography, which takes memory

    file = state / FILE
    try:
        return file.read_bytes()
    except FileNotFoundError:
        secret = os.urandom(KEY_BYTES)
    write_secret(file, secret)
    line = f"{device} {base64.b64encode(keys.LastingKey(secret).public).decode()}"
    (state / PUBLIC).write_text(f"{line}\n")
    return secret


def make_key(state: Path, device: str) -> None:
    """Make the key, so that other devices can pin it before the first job."""
    if not (state / FILE).exists():
        try:
            secret_key(state, device)
        except OSError as error:
            log.warning("%s cannot be made: %s", state / FILE, error.strerror)
