# SPDX-License-Identifier: Apache-2.0
"""Pure: the digest of a job's code, which the owners of devices list or sign."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from millpond.base.errors import ConfigError
from millpond.train.job.files import JobFile
from millpond.train.job.spec import WorkSpec

NAMESPACE = "millpond-code"
"""The namespace of signatures, see ssh-keygen(1): a signature for another purpose is none for code."""

LARGEST_SIGNATURE = 1 << 14
"""Bytes of a signature's file; those of the largest keys have some 3,000."""


def check_signature_size(file: JobFile | None, where: str) -> None:
    """Raise ConfigError, naming ``where``, for a signature that is none by its size."""
    if file and file.size > LARGEST_SIGNATURE:
        raise ConfigError(f"{where}: signature: {file.size} bytes are no signature of a job's code")


def digest(work: WorkSpec, files: Mapping[str, JobFile]) -> str:
    """Return the SHA-256, in hexadecimal, of a job's factory with its arguments, of the format of its data,
    and of the names and digests of all its files. The factory counts: Python itself has callables that run
    what their arguments say. So do arguments and format: by those a data set has other samples, whose groups
    are then others, too.
    """
    model, found = work.model, sorted((name, file.sha256) for name, file in files.items())
    called = [work.task, model.factory, model.arguments, work.format]
    return hashlib.sha256(json.dumps([called, found], sort_keys=True, default=str).encode()).hexdigest()
