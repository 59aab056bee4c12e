# SPDX-License-Identifier: Apache-2.0
"""Edge: make changes of a directory durable, and compute digests of files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make names that were created, renamed or removed in ``folder`` durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Compute the SHA-256 of a file's contents, in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
