# SPDX-License-Identifier: Apache-2.0
"""Pure: the digest of a job's code, which the owners of devices list or sign."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

NAMESPACE = "millpond-code"
"""The namespace of signatures, see ssh-keygen(1): a signature for another purpose is none for code."""


def digest(factory: str, code: Mapping[str, str]) -> str:
    """Return the SHA-256 of a job's factory and files, in hexadecimal. The factory counts: Python itself has
    callables that run what their arguments say.
    """
    return hashlib.sha256(json.dumps([factory, sorted(code.items())]).encode()).hexdigest()
