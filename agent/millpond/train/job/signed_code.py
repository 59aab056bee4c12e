# SPDX-License-Identifier: Apache-2.0
"""Pure: the digest of a job's code, which the owners of devices list or sign."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from millpond.train.job.files import JobFile

NAMESPACE = "millpond-code"
"""The namespace of signatures, see ssh-keygen(1): a signature for another purpose is none for code."""


def digest(factory: str, files: Mapping[str, JobFile]) -> str:
    """Return the SHA-256, in hexadecimal, of a job's factory and of the names and digests of all its files.
    The factory counts: Python itself has callables that run what their arguments say.
    """
    found = sorted((name, file.sha256) for name, file in files.items())
    return hashlib.sha256(json.dumps([factory, found]).encode()).hexdigest()
