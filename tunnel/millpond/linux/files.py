"""Edge: what makes a change of names last, and what a file's contents are known by."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make what was made, renamed or removed in ``folder`` last through a loss of power. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Of what the file holds, in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
